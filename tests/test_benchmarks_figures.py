"""The images of README and docs/ are those of the kept result files, in the theme of the reports."""

import re
from xml.etree import ElementTree

import pytest
from benchmarks import figures, performance

IMAGES = performance.DOCUMENT.parent / performance.IMAGES


@pytest.fixture(scope="module")
def kept():
    return performance.pictures(performance.RESULTS)


def test_the_committed_images_are_of_the_kept_results(kept):
    names = ("predicted", "linear-nvidia-h100-80gb-hbm3")
    assert set(kept) == {f"{name}.svg" for name in names}
    for name, content in kept.items():
        svg = (IMAGES / name).read_text(encoding="utf-8")
        assert f"<desc>{figures.digest(content)}</desc>" in svg, "run `python -m benchmarks performance`"
        ElementTree.fromstring(svg)
        style = re.search("<style>(.*?)</style>", svg)[1]
        light, dark = style.split("@media (prefers-color-scheme: dark)")
        for colour in re.findall(r"var\(--([\w-]+)\)", svg.replace(style, "")):
            assert f"--{colour}: rgb(" in light and f"--{colour}: rgb(" in dark


def test_the_picture_of_the_readme_is_of_the_committed_images():
    svg = (IMAGES / "overview.svg").read_text(encoding="utf-8")
    assert svg == figures.overview(IMAGES), "run `python -m benchmarks performance`"
    ids = re.findall(r'\bid="([^"]+)"', svg)
    assert len(ids) == len(set(ids)) and "Predicted, not measured" in svg
    ElementTree.fromstring(svg)


@pytest.mark.thorough
def test_figures_are_what_plotly_takes(kept):
    from plotly.graph_objects import Figure

    for content in kept.values():
        Figure(content)
