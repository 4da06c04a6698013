"""Pages, tables and images that benchmarks write are those of the kept results, images in the theme of the reports."""

import json
import re
from xml.etree import ElementTree

import pytest
from benchmarks import compiled, figures, performance, rates, settings

from octavo.planner.devices import DEVICES
from octavo.planner.roofline import product

H100 = DEVICES["h100"]
IMAGES = performance.DOCUMENT.parent / performance.IMAGES


def of_compiled(drop=0):
    return compiled.document(json.loads(compiled.RESULT.read_text())["rows"][drop:], compiled.DOCUMENT.read_text())


@pytest.mark.parametrize(
    ("path", "document", "command"),
    [
        (compiled.DOCUMENT, of_compiled, "compiled --write"),
        (rates.OUT, rates.text, "rates"),
        (settings.DOCUMENT, settings.document, "settings"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_document_is_of_the_results(path, document, command):
    assert path.read_text(encoding="utf-8") == document(), f"run `python -m benchmarks {command}`"


def test_compiled_graphs_of_all_arms_are_kept():
    rows = json.loads(compiled.RESULT.read_text())["rows"]
    arms = {(arm, False) for arm in (*compiled.RECIPES, *compiled.STORED, "opaque blockwise")}
    assert {(row["arm"], row["combo_kernels"]) for row in rows} == arms | {(arm, True) for arm in compiled.COMBINED}
    assert of_compiled(drop=1) != compiled.DOCUMENT.read_text()


def test_shares_of_an_h100_give_back_the_rates_that_were_measured():
    shares = rates.content()["gpu"]
    assert {name: getattr(H100, name) for name in shares if name.endswith("_efficiency")} == {
        name: share for name, share in shares.items() if name.endswith("_efficiency")
    }
    seconds = product(H100, 8192, 8192, 8192)
    assert 2 * 8192**3 / seconds / 1e12 == pytest.approx(760, rel=0.03)  # measured there
    assert H100.bandwidth == pytest.approx(2.42e12, rel=0.002)
    assert len(H100.measured) == len(rates.content()["entries"]) == 27


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
