"""Loss spikes, and recipes that the autopilot rejects, under tensor, context and expert parallelism and pipelines."""

from pathlib import Path
from unittest import mock

import pytest
from test_guard import GUARDED, LASTING
from test_hybrid import LAYOUTS, MLP, PIPELINE, moves, piloted_job, settings, slow  # noqa: F401  a fixture
from test_ranks import job, losses, tables  # noqa: F401  a fixture

from octavo.train import parse_config, run
from octavo.train.data.corpus import Corpus
from octavo.train.record.events import read_events
from octavo.train.record.statistics import read_statistics
from octavo.train.trainer import Trainer
from processes import gloo  # noqa: F401  a fixture

pytestmark = pytest.mark.dist
LAYOUTS_AND_EXPERTS = LAYOUTS | {"ep": (2, {"ep": 2})}


def spoiled_job(tables, out):  # noqa: F811
    """A run whose loss is three times larger on the batches of a spike."""
    take = Trainer.forward_backward

    def spoiled(self, *batch):
        return take(self, *batch) * (3.0 if self.step + self.skipped_batches in LASTING else 1.0)

    with mock.patch.object(Trainer, "forward_backward", spoiled):
        run(parse_config(tables), out=Path(out))


def without_job(tables, out, first, count):  # noqa: F811
    """A run whose data never had the batches of the spike."""
    batch = Corpus.batch

    def without(self, seed, step, size):
        return batch(self, seed, step + (count if step >= first else 0), size)

    with mock.patch.object(Corpus, "batch", without):
        run(parse_config(tables), out=Path(out))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp", "tp-whole", "pp", "pp-tp", "cp", "ep"])
def test_all_ranks_roll_back_after_a_spike(gloo, settings, tmp_path, layout):  # noqa: F811
    """To the checkpoint before it, and on as if its batches had never been, bit for bit."""
    world, parallel = LAYOUTS_AND_EXPERTS[layout]
    family = "mixtral" if layout == "ep" else "llama"
    guarded = GUARDED | {"optim": GUARDED["optim"] | {"micro_batches": 2}}
    made = settings(family, parallel=parallel, **guarded)
    gloo.run(spoiled_job, world, made, str(tmp_path / "spoiled"), timeout=240.0)
    events = [(event["step"], event["event"], event["to"]) for event in read_events(tmp_path / "spoiled")]
    assert events == [(29, "rollback", 20)]
    gloo.run(without_job, world, made, str(tmp_path / "without"), 20, 9, timeout=240.0)
    assert losses(tmp_path / "spoiled") == losses(tmp_path / "without")


RANKS = LAYOUTS | {"fsdp": (2, {}), "ddp": (2, {"dp_replicate": 2, "dp_shard": 1})}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["fsdp", "tp-fsdp", "ddp", "tp", "tp-whole", "cp", "cp-fsdp", "pp", "pp-fsdp", "pp-tp"]
)
def test_the_autopilot_equalizes_layers(gloo, settings, tmp_path, layout):  # noqa: F811
    """As in one process, although layers that ranks hold together have no channel scales in the repeated step."""
    world, parallel = RANKS[layout]
    piloted = {"level": "fp8", "autopilot": True}
    made = settings(run={"steps": 4}, precision=piloted, parallel=parallel, optim={"micro_batches": 2})
    made["model"]["config"] = PIPELINE
    gloo.run(piloted_job, world, made, str(tmp_path / "ranks"))
    mlp = MLP.format(PIPELINE["num_hidden_layers"] - 1)
    equalized = [(f"{mlp}.{name}", "rowwise → rowwise_equalized") for name in ("gate_proj", "up_proj")]
    assert [(layer, change.split(" (")[0]) for layer, change in moves(tmp_path / "ranks")] == equalized


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["pp", slow("pp-tp"), slow("pp-fsdp")])
@pytest.mark.parametrize("recipe", ["rowwise", slow("rowwise_equalized")])
def test_statistics_of_the_first_step_of_a_pipeline(gloo, settings, tmp_path, layout, recipe):  # noqa: F811
    """torch infers shapes in it, on uninitialized memory."""
    world, parallel = LAYOUTS[layout]
    precision = {"level": "fp8", "recipe": recipe}
    made = settings(inspect={"every": 1}, precision=precision, parallel=parallel, run={"steps": 3},
                    optim={"micro_batches": 2})  # fmt: skip
    gloo.run(job, world, made, str(tmp_path / "ranks"))
    job(made | {"parallel": {}}, tmp_path / "one")
    assert not read_events(tmp_path / "ranks")
    rows = [{(r.step, r.layer, r.operand): r for r in read_statistics(tmp_path / name)} for name in ("ranks", "one")]
    assert rows[0].keys() == rows[1].keys()
    for key, row in rows[1].items():
        assert rows[0][key].sqnr > row.sqnr - 0.7, key
        if key[2] in "xw" and recipe == "rowwise":
            assert rows[0][key].amax == pytest.approx(row.amax, rel=0.2), key
    if recipe == "rowwise_equalized" and layout == "pp":
        for key in rows[0].keys() & {key for key, row in rows[1].items() if row.channel_scales}:
            pairs = zip(rows[0][key].channel_scales, rows[1][key].channel_scales, strict=True)
            assert max(abs(a - b) for a, b in pairs) <= 1, key
