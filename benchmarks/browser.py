"""A headless Chromium, where one is installed: what a page looks like once its scripts have run."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
INSTALL = "apt-get install chromium"
MILLISECONDS = 20_000  # Virtual time that the scripts of a page have


def find() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


def run(page: Path, *options: str) -> tuple[str, list[str]]:
    """Open a file and return its document after its scripts, and what they wrote to the console."""
    done = _chromium(page, "--dump-dom", *options)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def screenshot(page: Path, path: Path, width: int, height: int) -> None:
    _chromium(page, f"--screenshot={path}", f"--window-size={width},{height}", "--hide-scrollbars")


def _chromium(page: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    browser = find()
    if browser is None:
        raise FileNotFoundError(f"none of {', '.join(NAMES)} is installed: {INSTALL}")
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser, "--headless=new", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}",
            "--enable-logging=stderr", "--v=0", f"--virtual-time-budget={MILLISECONDS}", *options,
            *(["--no-sandbox"] if os.geteuid() == 0 else []), page.resolve().as_uri(),
        ]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
