"""configs/*.toml and docs/configurations.md are those of the kept plans, and the plans are those of the planner."""

import pytest
from benchmarks import configs

from octavo.experiments.fit_layout import Search
from octavo.experiments.ready_models import ready_models
from octavo.train.config.run_config import load_config

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
