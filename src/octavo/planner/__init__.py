"""Level 3: what a training step will take, before it is run: memory, found by running it on tensors without storage."""
