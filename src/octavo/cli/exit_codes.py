"""Exit codes of `octavo`, for shells and CI, and handling of closed output.

    0, 1, 3, 4   from `typer.Exit`: done (also when a signal stopped a run), a failed run, or a verdict
    2            a user error, or an output that cannot be written
    70           Octavo failed: a traceback is on stderr
    130          interrupted, as 128 + SIGINT
    141          stdout or stderr was closed before the end, as 128 + SIGPIPE

Python, Click and Rich exit with 1 for tracebacks and closed pipes, but 1 of `octavo compare` means "an arm is worse".
"""

import os
import select
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

import typer

USAGE_ERROR = 2
INTERNAL = 70
INTERRUPTED = 130
CLOSED = 141
_COMPLETION = {"--install-completion", "--show-completion"}  # Options of Typer, which calls `sys.exit(0)` after them


def run(command: Callable[[], object]) -> int:
    """Run a Typer app on the arguments of the command line; return its exit code, with all output written."""
    code = _code(command)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except BrokenPipeError:
            discard(stream)
            code = code or CLOSED
        except OSError as error:
            discard(stream)
            code = code if code == USAGE_ERROR else _unwritten(error)  # a user error has printed its message
    return code


def _code(command: Callable[[], object]) -> int:
    try:
        command()
    except SystemExit as end:
        cause = end.__context__  # the reason of Click or Rich to exit
        if isinstance(cause, typer.Exit) or end.code == USAGE_ERROR:
            return int(end.code or 0)
        if isinstance(cause, BrokenPipeError):
            return CLOSED
        if isinstance(cause, typer.Abort) and isinstance(cause.__cause__, KeyboardInterrupt):
            return INTERRUPTED
        if cause is None and not end.code and _COMPLETION & set(sys.argv):
            return 0
        _show(end)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:  # from help and the version; commands handle theirs
        return _unwritten(error)
    except BaseException as error:
        _show(error)
    return INTERNAL


def _unwritten(error: OSError) -> int:
    with suppress(OSError):
        print(f"error: the output cannot be written: {error}", file=sys.stderr)
    return USAGE_ERROR


def _show(error: BaseException) -> None:
    with suppress(OSError):
        traceback.print_exception(error)


@contextmanager
def verdict(code: int) -> Iterator[None]:
    """Print a verdict in this context and exit with its code, even if the output is closed."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        for stream in (sys.stdout, sys.stderr):
            if is_closed(stream):
                discard(stream)
    raise typer.Exit(code)


def is_closed(stream: TextIO | None) -> bool:
    """Return whether a stream is a pipe without a reader."""
    if stream is None or not hasattr(select, "poll"):
        return stream is not None
    poll = select.poll()
    try:
        poll.register(stream.fileno(), 0)
    except (OSError, ValueError):  # a stream of no file, as in tests
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def discard(stream: TextIO) -> None:
    """Redirect a stream to the null device, because Python flushes it once more at exit."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
