"""The command line: `octavo init | train | watch | export | demo | compare | inspect | doctor | plan | calibrate`.

Results go to stdout, progress and messages to stderr; `exit_codes.py` lists the exit codes. Commands import torch and
the trainer inside, so that help and command line errors appear without delay.
"""

import os
from importlib.util import find_spec

from octavo.runtime.extras import needs_extras
from octavo.runtime.stopwatch import Stopwatch

STARTUP = Stopwatch()  # Runs from the beginning of the command

with needs_extras("the command octavo"):
    for package in ("rich", "pydantic"):  # imported later, so that --version and completion take no time
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    from octavo.cli import training, comparing, inspecting, planning  # noqa: I001 (the order in which --help lists commands)
    from octavo.cli.app import app
    from octavo.cli.exit_codes import run

__all__ = ["STARTUP", "app", "comparing", "inspecting", "main", "planning", "training"]


def main() -> None:
    """Entry point of the `octavo` command."""
    if "_OCTAVO_COMPLETE" in os.environ:  # set by a shell that completes a line; Typer exits by itself
        app()
    raise SystemExit(run(app))
