"""Checkpoints: what a run saves and resumes from, and its export for Transformers."""
