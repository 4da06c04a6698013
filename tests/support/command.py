"""The command line, run in this process."""

from typer.testing import CliRunner

from octavo.cli import app


def octavo(*words, **variables):
    """The result of a command, in an environment with these variables; what it raises is raised here."""
    return CliRunner().invoke(app, [str(word) for word in words], env=variables, catch_exceptions=False)


def refused(result, *words):
    """Assert exit code 2 and one clear message on stderr with these words, white space collapsed."""
    message = " ".join(result.stderr.split())
    assert result.exit_code == 2, (result.exit_code, result.output)
    assert all(word in message for word in words), message
    assert result.stdout == "" and "Traceback" not in message
