"""Benchmarks that anyone can repeat: `python -m benchmarks linear`. Results are JSON under `results/<device>/`."""
