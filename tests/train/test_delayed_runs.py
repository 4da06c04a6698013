"""Delayed scaling and channel scales through the trainer: they are part of a run, on one rank and on several."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import At, MakeConfig, assert_same, terminate

from octavo.train import ConfigError, parse_config, read_metrics, run
from octavo.train.checkpoint.digests import write_digests
from octavo.train.checkpoint.retention import latest_checkpoint
from processes import gloo  # noqa: F401  a fixture

PRECISION = {"level": "fp8", "recipe": "delayed"}


def trainer_state(out: Path) -> tuple[Path, dict[str, Any]]:
    folder = latest_checkpoint(out)
    assert folder is not None
    return folder / "trainer.json", json.loads((folder / "trainer.json").read_text())


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", ["delayed", "rowwise_equalized"])
@pytest.mark.parametrize("checkpointing", ["none", pytest.param("selective", marks=pytest.mark.slow)])
def test_resume_is_bitwise_the_uninterrupted_run(
    make_config: MakeConfig, tmp_path: Path, checkpointing: str, recipe: str
) -> None:
    precision = {"level": "fp8", "recipe": recipe, "checkpointing": checkpointing}
    config = make_config(precision=precision, optim={"micro_batches": 2, "lr": 0.05})
    run(config, out=tmp_path / "whole")
    run(config, out=tmp_path / "cut", progress=At(3, terminate))
    _, state = trainer_state(tmp_path / "cut")
    if recipe == "delayed":
        passes = [[value > 0 for value in row] for rows in state["delayed"].values() for row in rows]
        assert all(row == [False] + 6 * [True] + 10 * [False] for row in passes)  # one for each micro-batch
    else:
        assert {(layer["passes"], layer["backward_ran"]) for layer in state["equalized"].values()} == {(5, True)}
    assert len(state["delayed" if recipe == "delayed" else "equalized"]) == 21
    run(config, out=tmp_path / "cut", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
def test_without_its_histories_a_run_is_another(make_config: MakeConfig, tmp_path: Path) -> None:
    """And so the test above would fail without them; layers that a checkpoint does not know begin anew."""
    config = make_config(precision=PRECISION, optim={"lr": 0.05})
    run(config, out=tmp_path / "whole")
    run(config, out=tmp_path / "cut", progress=At(3, terminate))
    file, state = trainer_state(tmp_path / "cut")
    layer = "model.layers.0.mlp.up_proj"
    state["delayed"][layer] = [[1.0], [1.0]]
    rewrite(file, state)
    with pytest.raises(ConfigError, match=f"damaged .the amax history of {layer} must be two lists of 17"):
        run(config, out=tmp_path / "cut", resume=True)
    del state["delayed"]
    rewrite(file, state)
    assert run(config, out=tmp_path / "cut", resume=True).stopped == "done"
    with pytest.raises(AssertionError):
        assert_same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.thorough
def test_without_its_channel_scales_a_run_is_another(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(precision={"level": "fp8", "recipe": "rowwise_equalized"}, optim={"lr": 0.05})
    run(config, out=tmp_path / "whole")
    run(config, out=tmp_path / "cut", progress=At(3, terminate))
    file, state = trainer_state(tmp_path / "cut")
    layer = "model.layers.0.mlp.up_proj"
    state["equalized"][layer]["exponents"] = [1]
    rewrite(file, state)
    with pytest.raises(ConfigError, match=f"damaged .the channel scales of {layer} are not what"):
        run(config, out=tmp_path / "cut", resume=True)
    del state["equalized"]
    rewrite(file, state)
    assert run(config, out=tmp_path / "cut", resume=True).stopped == "done"
    with pytest.raises(AssertionError):
        assert_same(tmp_path / "whole", tmp_path / "cut")


def rewrite(file: Path, state: dict[str, Any]) -> None:
    """Put another state into a checkpoint, with its digest."""
    file.write_text(json.dumps(state))
    write_digests(file.parent, {})


def job(tables: dict[str, Any], out: str, steps: int, resume: bool = False) -> Any:
    """One rank of a run."""
    return run(parse_config(tables | {"run": tables["run"] | {"steps": steps}}), out=Path(out), resume=resume)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "rowwise_equalized"])
def test_ranks_resume_with_their_one_state(
    gloo: Any,  # noqa: F811
    make_config: MakeConfig,
    tmp_path: Path,
    recipe: str,
) -> None:
    optim = {"batch": 8, "micro_batches": 2, "lr": 0.05, "warmup": 0, "schedule": "constant"}
    config = make_config(precision={"level": "fp8", "recipe": recipe, "parameters": "fp32"}, optim=optim)
    tables = config.model_dump(exclude_none=True) | {"parallel": {"fp8_comm": "gather"}}
    gloo.run(job, 2, tables, str(tmp_path / "whole"), 4)
    for steps, resume in ((2, False), (4, True)):
        gloo.run(job, 2, tables, str(tmp_path / "cut"), steps, resume)
    key = "delayed" if recipe == "delayed" else "equalized"
    states = [trainer_state(tmp_path / name)[1][key] for name in ("whole", "cut")]
    assert states[0] == states[1] and states[0]
    losses = [[row.loss for row in read_metrics(tmp_path / name)] for name in ("whole", "cut")]
    assert losses[0] == losses[1]
