"""Benchmarks that anyone can repeat: `python -m benchmarks linear`. Results are JSON under `results/<device>/`."""

import time

STARTED = time.time()
"""When this process began, but for the start of Python."""
