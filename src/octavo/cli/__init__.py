"""The command line: `octavo train | export | demo | compare | inspect | doctor | plan | calibrate`.

A mistake of the user (a wrong key, a missing file, data that cannot be used) is one message on stderr and exit code 2;
`--traceback` shows where it was raised. Code 1 is a run that failed: a loss that is not finite. A run that was told to
stop has saved and is a success, 0; `octavo compare` has codes of its own, for CI; `exit_codes.py` has those of all
other ends. Results go to stdout, progress and messages to stderr.

Torch and the trainer are imported inside the commands, so that help, and a mistake on the command line, come at once.
"""

from octavo.cli import training, comparing, inspecting, planning  # noqa: I001 (the order in which --help lists commands)
from octavo.cli.app import app
from octavo.cli.exit_codes import run

__all__ = ["app", "comparing", "inspecting", "main", "planning", "training"]


def main() -> None:
    """Entry point of the `octavo` command."""
    raise SystemExit(run(app))
