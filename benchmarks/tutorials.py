"""The tutorials of docs/tutorials: their `sh` blocks run in order, in a folder with a copy of configs/ and the files
that the page shows (blocks that begin with `# name.py` or `# name.toml`), and pictures of the reports that they write.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks import browser, command

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "tutorials"
IMAGES = ROOT / "docs" / "images"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
NAMED = re.compile(r"# ([\w.-]+\.(?:py|toml))\n")
SHOW = """<script>
function show(parts, hidden) {
  if (!document.querySelector(".plot .main-svg")) return setTimeout(show, 100, parts, hidden);
  const shown = new Set(document.querySelectorAll(parts)), main = document.querySelector("main");
  if (hidden) for (const part of document.querySelectorAll(hidden)) part.remove();
  for (const part of document.querySelectorAll("main > *, main > .small > *"))
    if (!shown.has(part) && ![...shown].some(each => part.contains(each))) part.remove();
  main.style.padding = "12px";
  window.dispatchEvent(new Event("resize"));
  const box = main.getBoundingClientRect();
  document.body.dataset.size = `${Math.ceil(box.width)},${Math.ceil(box.height)}`;
}
show(PARTS, HIDDEN);
</script>"""


@dataclass(frozen=True)
class Picture:
    """Parts of a report, by CSS selector, less those hidden, as docs/images/<name>.png."""

    name: str
    page: str
    report: str
    parts: str
    hidden: str = ""


PICTURES = (
    Picture("demo-report", "ten-minutes", "runs/demo/report.html", ".verdict, .tiles, .tiles + .card"),
    Picture("inspected", "the-layer-that-breaks", "runs/broken/report.html", ".card.long",
            "figure:not(:nth-of-type(2))"),
    Picture("vlm-report", "a-vlm", "runs/vlm/report.html", ".tiles, .tiles + .card, .small"),
    Picture("lora-report", "lora", "runs/lora/report.html", ".tiles, .tiles + .card"),
)  # fmt: skip


def files_of(text: str) -> dict[str, str]:
    named = [(NAMED.match(content), content) for language, content in BLOCK.findall(text) if language != "sh"]
    return {match[1]: content for match, content in named if match}


def commands_of(text: str) -> list[str]:
    return [content for language, content in BLOCK.findall(text) if language == "sh"]


def run(page: Path, folder: Path) -> None:
    """Run a page's commands in a folder; what they print goes to the terminal. CalledProcessError where one fails."""
    text = page.read_text(encoding="utf-8")
    shutil.copytree(ROOT / "configs", folder / "configs")  # makes the folder, too
    for name, content in files_of(text).items():
        (folder / name).write_text(content, encoding="utf-8")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for block in commands_of(text):
        print(f"\n$ {block}", end="", flush=True)
        subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=folder, env=environment, check=True)


def draw(picture: Picture, folder: Path) -> None:
    report = folder / picture.report
    script = SHOW.replace("PARTS", json.dumps(picture.parts)).replace("HIDDEN", json.dumps(picture.hidden))
    page = report.with_name("shown.html")
    page.write_text(report.read_text(encoding="utf-8").replace("</body>", f"{script}</body>"), encoding="utf-8")
    document, messages = browser.run(page, "--window-size=1000,1200")
    size = re.search(r'data-size="(\d+),(\d+)"', document)
    if size is None:
        raise RuntimeError(f"{picture.report} draws no chart: {messages}")
    browser.screenshot(page, IMAGES / f"{picture.name}.png", int(size[1]), int(size[2]))


def main(arguments: list[str]) -> None:
    names = sorted(path.stem for path in PAGES.glob("*.md"))
    parser = command("tutorials", __doc__)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"default: all of {', '.join(names)}")
    options = parser.parse_args(arguments)
    if unknown := set(options.pages) - set(names):
        parser.error(f"no page {', '.join(sorted(unknown))} in docs/tutorials; there are {', '.join(names)}")
    for name in options.pages or names:
        with tempfile.TemporaryDirectory(prefix=f"{name}-") as scratch:
            folder = Path(scratch)
            run(PAGES / f"{name}.md", folder)
            for picture in (picture for picture in PICTURES if picture.page == name):
                if browser.find() is None:
                    print(f"{picture.name}.png is not drawn: no Chromium is installed: {browser.INSTALL}")
                else:
                    draw(picture, folder)
