"""The tutorials run as written, and show the pictures that their commands make."""

import re
import subprocess

import pytest
from benchmarks import tutorials

PAGES = sorted(tutorials.PAGES.glob("*.md"))


def test_every_picture_is_shown_by_the_page_that_makes_it():
    for picture in tutorials.PICTURES:
        text = (tutorials.PAGES / f"{picture.page}.md").read_text(encoding="utf-8")
        assert f"](../images/{picture.name}.png)" in text
        out = picture.report.removesuffix("/report.html")
        assert any(re.search(rf"--out {out}\b", command) for command in tutorials.commands_of(text)), picture
    shown = {name for page in PAGES for name in re.findall(r"images/([\w-]+)\.png", page.read_text(encoding="utf-8"))}
    assert shown == {picture.name for picture in tutorials.PICTURES}


def test_files_and_commands_of_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\n# a.py\nprint(1)\n```\n\n```sh\npython a.py > out\n```\n\n```\nexit 1\n```\n")
    folder = tmp_path / "folder"
    tutorials.run(page, folder)
    assert (folder / "out").read_text() == "1\n" and (folder / "configs" / "demo.toml").exists()
    page.write_text("```sh\npython -c 'raise SystemExit(3)' | cat\n```\n")
    with pytest.raises(subprocess.CalledProcessError):
        tutorials.run(page, tmp_path / "other")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_runs_as_written(page, tmp_path):
    pytest.importorskip("peft")
    folder = tmp_path / "folder"
    tutorials.run(page, folder)  # raises if a command fails
    for picture in tutorials.PICTURES:
        assert picture.page != page.stem or (folder / picture.report).exists()
