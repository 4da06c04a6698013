"""Benchmarks that anyone can repeat: `python -m benchmarks linear`. Results are JSON under `results/<device>/`."""

import argparse
import time

STARTED = time.time()  # When this process began, but for the start of Python


def command(name: str, description: str | None, examples: str = "") -> argparse.ArgumentParser:
    """The parser of `python -m benchmarks name`; `examples` are lines of a command each."""
    lines = [f"  python -m benchmarks {line}".rstrip() for line in examples.splitlines()]
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}", description=description,
        epilog="\n".join(["examples:", *lines]) if lines else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
