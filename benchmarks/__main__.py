"""`python -m benchmarks <name> [options]`."""

import sys

from benchmarks import linear, sass

BENCHMARKS = {"linear": linear.main, "sass": sass.main}

if len(sys.argv) < 2 or sys.argv[1] not in BENCHMARKS:
    sys.exit(f"usage: python -m benchmarks {{{','.join(BENCHMARKS)}}} [options]")
BENCHMARKS[sys.argv[1]](sys.argv[2:])
