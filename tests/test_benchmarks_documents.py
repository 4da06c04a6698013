"""Pages, tables and images that benchmarks write are those of the kept results, images in the theme of the reports."""

import re
from xml.etree import ElementTree

import pytest
from benchmarks import figures, performance, settings

from octavo.planner.devices import DEVICES
from octavo.planner.roofline import product

H100 = DEVICES["h100"]
IMAGES = performance.DOCUMENT.parent / performance.IMAGES


def test_the_page_of_settings_is_of_the_sections():
    text = settings.DOCUMENT.read_text(encoding="utf-8")
    assert text == settings.document(), "run `python -m benchmarks settings`"


def test_shares_of_an_h100_give_back_the_rates_that_were_measured():
    seconds = product(H100, 8192, 8192, 8192)
    assert 2 * 8192**3 / seconds / 1e12 == pytest.approx(760, rel=0.03)  # measured there
    assert H100.bandwidth == pytest.approx(2.42e12, rel=0.002)
    assert len(H100.measured) == 27


@pytest.fixture(scope="module")
def kept():
    return performance.pictures(performance.RESULTS)


def test_the_committed_images_are_of_the_kept_results(kept):
    assert set(kept) == {"linear-nvidia-h100-80gb-hbm3.svg"}
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
