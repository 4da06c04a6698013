"""Dropout, activation checkpointing and comparisons under every mesh."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_hybrid import LAYOUTS, MIXTRAL, PIPELINE, settings, slow  # noqa: F401  a fixture
from test_ranks import job, losses, tables  # noqa: F401  a fixture

from octavo.experiments.compare_runs import compare, make_arms
from octavo.parallel.pipeline_model import SCHEDULES, ZERO_BUBBLE
from octavo.parallel.tensor_parallel_plan import partial_parameters
from octavo.tensor import local_tensor
from octavo.train import parse_config, read_metrics
from octavo.train import trainer as trainer_module
from octavo.train.checkpoint.retention import checkpoints
from octavo.train.trainer import Trainer
from processes import gloo  # noqa: F401  a fixture

pytestmark = pytest.mark.dist
MESHES = LAYOUTS | {"ep": (2, {"ep": 2}), "ep-fsdp": (4, {"ep": 2})}
STARCODER = {key: value for key, value in PIPELINE.items() if key != "head_dim"}
DROPOUT = {"residual_dropout": 0.2, "embedding_dropout": 0.1}
"""Of the residual stream, which ranks of tensor parallelism have all, or their tokens of."""


@pytest.fixture
def dropping(settings):  # noqa: F811
    """A run of a model with dropout on a mesh."""

    def make(layout, attention=0.1, **sections):
        parallel = MESHES[layout][1]
        family = "mixtral" if "ep" in parallel else "starcoder2"
        sections["optim"] = {"micro_batches": 2} | sections.get("optim", {})
        made = settings(family, parallel=parallel, **sections)
        dropout = {"attention_dropout": attention} | ({} if "ep" in parallel else DROPOUT)
        made["model"]["config"] = (MIXTRAL if "ep" in parallel else STARCODER) | dropout
        return made

    return make


SOME = ["tp", "pp", *map(slow, ("tp-whole", "tp-fsdp", "pp-tp", "pp-fsdp", "cp", "ep"))]


@pytest.mark.slow
@pytest.mark.parametrize("layout", SOME)
def test_checkpointing_recomputes_with_the_same_dropout(gloo, dropping, tmp_path, layout):  # noqa: F811
    """Losses are bitwise those without it; so are those of a resumed run."""
    for name in ("none", "full"):
        made = dropping(layout, precision={"level": "fp8", "checkpointing": name}, run={"save_every": 3})
        gloo.run(job, MESHES[layout][0], made, str(tmp_path / name))
    assert losses(tmp_path / "full") == losses(tmp_path / "none")
    shutil.rmtree(checkpoints(tmp_path / "full")[-1])
    gloo.run(job, MESHES[layout][0], made, str(tmp_path / "full"), resume=True)
    assert losses(tmp_path / "full") == losses(tmp_path / "none")
    without = dropping(layout, attention=0.0)
    without["model"]["config"] |= dict.fromkeys(DROPOUT if "ep" not in layout else (), 0.0)
    gloo.run(job, MESHES[layout][0], without, str(tmp_path / "without"))
    assert losses(tmp_path / "without")[0] != losses(tmp_path / "none")[0]


@pytest.mark.slow
def test_ranks_with_all_tokens_drop_the_same(gloo, dropping, tmp_path):  # noqa: F811
    """Losses are those of one process, whose masks of the residual stream are the same."""
    made = dropping("tp-whole", attention=0.0)
    gloo.run(job, 2, made, str(tmp_path / "ranks"))
    job(made | {"parallel": {}}, tmp_path / "one")
    assert losses(tmp_path / "ranks") == pytest.approx(losses(tmp_path / "one"), rel=2e-3)


def masks_job(tables):  # noqa: F811
    """Which values of the residual stream this rank drops in a step, and its replicated parameters after two."""
    masks, found = [], {}
    make = trainer_module.make_optimizer

    def hooked(model, *args):
        block = model.model.layers[0].mlp
        block.register_forward_hook(lambda module, args, y: masks.append(y == 0))
        return make(model, *args)

    from octavo.train.data.load import load_corpus
    from octavo.train.ranks import join_ranks
    from octavo.train.record.progress import NullProgress

    config = parse_config(tables)
    with pytest.MonkeyPatch.context() as patch, join_ranks(config) as ranks:
        patch.setattr(trainer_module, "make_optimizer", hooked)
        data = load_corpus(config.data, config.model, NullProgress())
        trainer = Trainer(config, data, ranks.device, ranks=ranks)
        for _ in range(2):
            trainer.train_step()
        names = {name for name, p in trainer.model.named_parameters() if "norm" in name or "embed" in name}
        assert names and (dist.get_world_size() == 1 or names <= partial_parameters(trainer.model) or not names)
        found = {n: local_tensor(p).detach().clone() for n, p in trainer.model.named_parameters() if n in names}
    return masks[0], found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp-fsdp", "tp"])
def test_ranks_with_other_tokens_drop_others(gloo, dropping, layout):  # noqa: F811
    """And ranks that hold the same parameters update them alike."""
    ranks = gloo.run(masks_job, MESHES[layout][0], dropping(layout))
    masks = [mask for mask, _ in ranks]
    assert all(0.15 < mask.float().mean() < 0.25 for mask in masks)
    assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
    for (_, own), (_, other) in zip(ranks[::2], ranks[1::2], strict=True):
        assert len(own) > 4 and all(torch.equal(own[name], other[name]) for name in own)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp", "tp-whole", "tp-fsdp", "pp", "pp-fsdp", "pp-tp"])
def test_twenty_losses(gloo, settings, tmp_path, layout):  # noqa: F811
    """With parameters in fp32, whose updates no rounding hides: within 0.15 % of one process."""
    precision = {"level": "fp8", "parameters": "fp32"}
    made = settings(parallel=MESHES[layout][1], precision=precision, run={"steps": 20}, optim={"micro_batches": 2})
    gloo.run(job, MESHES[layout][0], made, str(tmp_path / "ranks"), timeout=240.0)
    job(made | {"parallel": {}}, tmp_path / "one")
    assert losses(tmp_path / "ranks") == pytest.approx(losses(tmp_path / "one"), rel=1.5e-3)


def compare_job(path, out, arms):
    comparison = compare(make_arms(path, [], arms, "2"), Path(out))
    return comparison.exit_code, comparison.arms[0].losses.test.gaps


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp", "tp", "tp-whole", "tp-fsdp", "cp", "ep", "pp-tp"])
def test_comparisons(gloo, settings, tmp_path, layout):  # noqa: F811
    """Gaps of a mesh are those of one process within 0.3 %."""
    world, parallel = MESHES[layout]
    plain = "fp8" if "ep" in parallel else "bf16"  # experts in bf16 cannot be distributed
    for name, there in (("ranks", parallel), ("one", {})):
        made = settings("mixtral" if "ep" in parallel else "llama", parallel=there, optim={"micro_batches": 2})
        if "pp" in parallel:
            made["model"]["config"] = PIPELINE
        (tmp_path / f"{name}.toml").write_text(parse_config(made).to_toml())
    arms = (f"plain:precision.level={plain}", "blockwise:precision.level=fp8 precision.recipe=rowwise_hp_wgrad")
    ranks = gloo.run(compare_job, world, str(tmp_path / "ranks.toml"), str(tmp_path / "ranks"), arms, timeout=300.0)
    assert all(verdict == ranks[0] for verdict in ranks)
    _, gaps = compare_job(str(tmp_path / "one.toml"), tmp_path / "one", arms)
    assert ranks[0][1] == pytest.approx(gaps, abs=0.3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "schedule"),
    [*(("pp", name) for name in SCHEDULES), ("pp-fsdp", "1F1B"), ("pp-tp", "1F1B")],
)
def test_the_stages_of_a_pipeline_evaluate(gloo, dropping, tmp_path, layout, schedule):  # noqa: F811
    """Losses of held-out text are those of one process, and training is bitwise that without them."""
    world, parts = MESHES[layout][0], {"micro_batches": 4, "batch": 8, "ema": 0.9}
    made = dropping(layout, optim=parts, precision={"level": "fp8"}, run={"steps": 4})
    made["parallel"] |= {"schedule": schedule, "reshard_after_forward": schedule not in ZERO_BUBBLE}
    evaluated = made | {"eval": {"every": 1, "fraction": 0.3, "batches": 3, "ema": True}}
    often, rare = (evaluated | {"eval": evaluated["eval"] | {"every": every}} for every in (1, 0))
    results = gloo.run(job, world, often, str(tmp_path / "often"))
    gloo.run(job, world, rare, str(tmp_path / "rare"))
    assert losses(tmp_path / "often") == losses(tmp_path / "rare")
    assert all(result.held_out == results[0].held_out for result in results)
    made["model"]["config"] |= dict.fromkeys((*DROPOUT, "attention_dropout"), 0.0)
    for name, there in (("ranks", made["parallel"]), ("one", {})):
        tables_of_run = evaluated | {"model": made["model"], "parallel": there}
        gloo.run(job, world, tables_of_run, str(tmp_path / name)) if there else job(tables_of_run, tmp_path / name)
    for row, expected in zip(*(read_metrics(tmp_path / name) for name in ("ranks", "one")), strict=True):
        assert row.held_out == pytest.approx(expected.held_out, rel=2e-3)
        assert row.held_out.keys() == {"loss", "loss_high_precision", "loss_ema"}
