"""Text to batches: sources, documents, the tokenizer, and the windows of each step."""
