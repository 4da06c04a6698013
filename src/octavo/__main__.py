"""`python -m octavo` and the `octavo` command: one line and exit code 2 if the packages of the command are missing."""

import sys

from octavo._version import __version__


def main() -> None:
    """Entry point of the `octavo` command."""
    if sys.argv[1:] == ["--version"]:  # needs no package, and no time
        print(f"octavo {__version__}")
        return
    try:
        from octavo.cli import main as run
    except ModuleNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    run()


if __name__ == "__main__":
    main()
