"""Python in a process of its own, where Triton compiles instead of interpreting."""

import os
import subprocess
import sys
from pathlib import Path

import octavo

ROOT = Path(__file__).parents[2]


def run_python(*command, path=()):
    """What `python COMMAND` prints in the repository, with folders before others on its path."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    folders = *path, ROOT, Path(octavo.__file__).parents[1], *filter(None, [os.environ.get("PYTHONPATH")])
    environment["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
