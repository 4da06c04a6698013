"""A headless Chromium that a test clicks in, driven through chromedriver (W3C WebDriver) with the standard library."""

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

from benchmarks import browser

INSTALL = "apt-get install chromium chromium-driver"


def missing():
    if browser.find() is None:
        return f"no Chromium is installed: {INSTALL}"
    return None if shutil.which("chromedriver") else f"no chromedriver is installed: {INSTALL}"


class Driver:
    """A browser window. A context manager.

    Args:
        options: Of Chromium, such as `--window-size=390,844`.
    """

    def __init__(self, *options):
        self._options = options

    def __enter__(self):
        self._profile = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = ""
        while (port := re.search(r"on port (\d+)", line)) is None or "successfully" not in line:
            line = self._process.stdout.readline()
            assert line, "chromedriver has ended"
        self._base = f"http://127.0.0.1:{port[1]}/session"
        arguments = [
            "--headless=new", "--disable-gpu", "--no-first-run", f"--user-data-dir={self._profile.name}",
            *(["--no-sandbox"] if os.geteuid() == 0 else []), *self._options,
        ]  # fmt: skip
        chrome = {"binary": browser.find(), "args": arguments}
        wanted = {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._call("POST", "", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        self._base += f"/{session}"
        return self

    def __exit__(self, kind, error, traceback):
        try:
            self._call("DELETE", "")
        finally:
            self._process.terminate()
            self._process.communicate()
            self._profile.cleanup()

    def open(self, url):
        self._call("POST", "/url", {"url": url})

    def run(self, script, *arguments):
        """Run the body of a JavaScript function; returns what it returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector="body"):
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def wait(self, condition, seconds=30.0):
        end = time.monotonic() + seconds
        while not self.run(f"return {condition}"):
            assert time.monotonic() < end, f"not after {seconds} s: {condition}\n{self.text()[:2000]}"
            time.sleep(0.1)

    def messages(self):
        """What the page wrote to the console since the last call."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def _call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return json.loads(response.read())["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.loads(error.read())["value"]["message"].splitlines()[0]) from None
