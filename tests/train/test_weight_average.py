"""The moving average of the weights: `optim.ema`, `eval.ema` and `octavo export --ema`."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import MakeConfig, assert_same, curve, saved

from octavo.train import parse_config, read_metrics, run
from octavo.train.checkpoint.export import export
from octavo.train.checkpoint.retention import latest_checkpoint
from octavo.train.config.run_config import ConfigError
from octavo.train.optimizer import TrainerOptimizer, average_decay
from octavo.train.run_plan import plan_memory
from processes import gloo  # noqa: F401  a fixture

PRECISIONS: list[dict[str, Any]] = [
    {},
    {"level": "fp8+activations+optimizer"},
    {"parameters": "fp32"},
]


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_it_is_the_average_of_the_masters(
    precision: dict[str, Any], make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, masters = TrainerOptimizer.step, []

    def recorded(optimizer: TrainerOptimizer, *args: Any, **options: Any) -> None:
        if not masters:
            masters.append([values.clone() for values in optimizer.masters()])
        step(optimizer, *args, **options)
        masters.append([values.clone() for values in optimizer.masters()])

    monkeypatch.setattr(TrainerOptimizer, "step", recorded)
    sections: dict[str, Any] = {"precision": precision, "optim": {"ema": 0.5}, "run": {"save_every": 3}}
    run(make_config(**sections), out=tmp_path / "run")
    average = [values.double() for values in masters[0]]
    for number, values in enumerate(masters[1:]):
        decay = average_decay(0.5, number)
        average = [decay * old + (1 - decay) * new.double() for old, new in zip(average, values, strict=True)]
    state = {name: value for name, value in saved(tmp_path / "run").items() if name.startswith("ema.")}
    for value, expected in zip(state.values(), average, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-7)
    shutil.copytree(tmp_path / "run", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-000006")
    run(make_config(**sections), out=tmp_path / "cut", resume=True)
    assert_same(tmp_path / "run", tmp_path / "cut")


def test_evaluation_and_export_of_the_average(make_config: MakeConfig, tmp_path: Path) -> None:
    level = {"level": "fp8+activations+optimizer"}
    sections: dict[str, Any] = {"precision": level, "eval": {"fraction": 0.3, "every": 3}}
    run(make_config(**sections), out=tmp_path / "plain")
    sections |= {"optim": {"ema": 0.9}, "eval": {"fraction": 0.3, "every": 3, "ema": True}}
    run(make_config(**sections), out=tmp_path / "run")
    rows = [read_metrics(tmp_path / name) for name in ("plain", "run")]
    assert [row.loss for row in rows[0]] == [row.loss for row in rows[1]]  # training does not change
    last = rows[1][-1].held_out
    assert last is not None and list(last) == ["loss", "loss_high_precision", "loss_ema"]
    assert last["loss"] != last["loss_ema"]
    checkpoint = latest_checkpoint(tmp_path / "run")
    assert checkpoint is not None
    export(checkpoint, tmp_path / "exported", ema=True)
    weights, average = load_file(tmp_path / "exported" / "model.safetensors"), saved(tmp_path / "run")
    assert len(weights) > 20
    for name, value in weights.items():
        assert torch.equal(value, average[f"ema.{name}"].to(torch.bfloat16)), name
    start = {"model": {"path": str(tmp_path / "exported")}, "optim": {"lr": 1e-30}, "precision": level}
    run(make_config(**start, run={"steps": 3}, eval={"fraction": 0.3}), out=tmp_path / "again")
    measured = read_metrics(tmp_path / "again")[-1].held_out
    assert measured is not None and measured["loss"] == pytest.approx(last["loss_ema"], abs=1e-4)
    plain = latest_checkpoint(tmp_path / "plain")
    assert plain is not None
    with pytest.raises(ConfigError, match="has no averaged weights: train with optim.ema"):
        export(plain, tmp_path / "none", ema=True)
    with pytest.raises(ConfigError, match="eval.ema measures averaged weights, and there are none"):
        make_config(eval={"ema": True})
    with pytest.raises(ConfigError, match=r"another run: there optim.ema = 0.9, here unset"):
        run(make_config(**sections | {"optim": {}, "eval": {"fraction": 0.3}}), out=tmp_path / "run", resume=True)


def test_a_plan_counts_it(make_config: MakeConfig) -> None:
    plans = [plan_memory(make_config(optim=optim)) for optim in ({}, {"ema": 0.9})]
    states = [plan.at_peak["optimizer states"] for plan in plans]
    parameters = plans[0].at_peak["parameters"] // 2
    assert states[1] - states[0] == pytest.approx(4 * parameters, rel=0.1)


def ranks_job(tables: dict[str, Any], out: str, resume: bool = False) -> None:
    run(parse_config(tables), out=Path(out), resume=resume)


@pytest.mark.dist
@pytest.mark.slow
def test_shards_of_it_go_to_any_number_of_ranks(gloo: Any, make_config: MakeConfig, tmp_path: Path) -> None:  # noqa: F811
    sections: dict[str, Any] = {"optim": {"ema": 0.9, "batch": 8}, "run": {"steps": 3}}
    tables = json.loads(json.dumps(make_config(**sections).model_dump(mode="json", exclude_none=True)))
    gloo.run(ranks_job, 2, tables, str(tmp_path / "run"), timeout=400.0)
    checkpoint = latest_checkpoint(tmp_path / "run")
    assert checkpoint is not None and (checkpoint / "shards").exists()
    export(checkpoint, tmp_path / "two", ema=True)
    shutil.copytree(tmp_path / "run", tmp_path / "one")
    tables["run"]["steps"] = 4
    run(parse_config(tables), out=tmp_path / "one", resume=True)  # shards to one process, which writes whole states
    one = latest_checkpoint(tmp_path / "one")
    assert one is not None
    gloo.run(ranks_job, 2, tables, str(tmp_path / "run"), resume=True, timeout=400.0)
    two = latest_checkpoint(tmp_path / "run")
    assert two is not None
    for folder, name in ((one, "from_one"), (two, "from_two")):
        export(folder, tmp_path / name, ema=True)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("from_one", "from_two"))
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=0.02, atol=1e-3)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        None,
        {"reshard_after_forward": False, "fp8_comm": "off"},
        {"reshard_after_forward": False, "fp8_comm": "gather"},
    ],
    ids=str,
)
def test_measuring_it_leaves_no_trace(gloo, make_config, tmp_path, parallel):  # noqa: F811
    """Its weights are in the parameters for a while: not in what the next step gathers, or reuses in FP8."""
    sections = {"precision": {"level": "fp8", "keep_weights": parallel is None}, "run": {"steps": 4}}
    sections |= {"optim": {"ema": 0.5, "batch": 8}, "eval": {"fraction": 0.3}}
    sections |= {"parallel": parallel} if parallel is not None else {}
    for name, measured in (("often", {"every": 1, "ema": True}), ("never", {})):
        config = make_config(**sections | {"eval": sections["eval"] | measured})
        tables = json.loads(json.dumps(config.model_dump(mode="json", exclude_none=True)))
        if parallel is None:
            ranks_job(tables, str(tmp_path / name))
        else:
            gloo.run(ranks_job, 2, tables, str(tmp_path / name))
    assert curve(tmp_path / "often") == curve(tmp_path / "never")
    for row in read_metrics(tmp_path / "often"):
        assert row.held_out is not None and row.held_out["loss_ema"] != row.held_out["loss"]
