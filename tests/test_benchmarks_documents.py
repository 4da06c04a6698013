"""Pages, tables, images and configurations that benchmarks write are those of the kept results and plans."""

import re
from xml.etree import ElementTree

import pytest
from benchmarks import configs, figures, performance, settings

from octavo.experiments.fit_layout import Search
from octavo.experiments.ready_models import ready_models
from octavo.planner.devices import DEVICES
from octavo.planner.roofline import product
from octavo.train.config.run_config import load_config

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


# --- configs/*.toml and docs/configurations.md ---


KEPT = configs.read()
OTHERS = {"demo", "own-data", "sft-demo", "vit-digits", "vlm-digits", "dit-digits", "lora-llama3-70b"}
ROWS = [(name, step) for name, steps in KEPT.items() for step in steps if step.layout is not None]


def test_every_model_has_a_configuration_with_its_plans():
    assert list(KEPT) == list(ready_models())
    assert {path.stem for path in (configs.ROOT / "configs").glob("*.toml")} == set(KEPT) | OTHERS
    for name, steps in KEPT.items():
        path = configs.ROOT / "configs" / f"{name}.toml"
        assert path.read_text() == configs.configuration(ready_models()[name], steps), "python -m benchmarks configs"
        assert load_config(path).model.type == ready_models()[name].type
        assert {step.gpus for step in steps if step.precision == "FP8"} == set(configs.COUNTS)


def test_the_page_is_that_of_the_plans():
    assert configs.DOCUMENT.read_text() == configs.document(KEPT), "run `python -m benchmarks configs --document`"
    assert configs.document(KEPT).count("\n| [") == len(KEPT)


GAIN_NO_TIME = {("qwen3-30b-a3b", 64)}  # Models and numbers of GPUs, as docs/configurations.md says


def test_fp8_is_faster_than_bf16_but_where_the_page_says_otherwise():
    """Of layouts that each level chose for itself."""
    slower = set()
    for name, steps in KEPT.items():
        by_level = {(step.precision, step.gpus): step for step in steps if step.layout is not None}
        for (precision, gpus), bf16 in by_level.items():
            if precision == "bf16" and by_level["FP8", gpus].tokens_per_second <= bf16.tokens_per_second:
                slower.add((name, gpus))
    assert slower == GAIN_NO_TIME


@pytest.mark.slow
@pytest.mark.parametrize(("name", "step"), ROWS, ids=lambda value: getattr(value, "precision", value))
def test_every_plan_is_that_of_the_planner(name, step):
    level = "bf16" if step.precision == "bf16" else None
    planned = Search(model=ready_models()[name], gpu=configs.GPU, gpus=step.gpus, level=level).plan(step.layout).step
    assert planned.precision == step.precision
    assert planned.seconds == pytest.approx(step.seconds, rel=1e-3)
    assert planned.peak == pytest.approx(step.peak, rel=1e-3)
    assert planned.largest == step.largest
