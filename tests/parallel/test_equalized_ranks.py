"""Channel equalization on ranks: one s for all, also in weights that travel in FP8, and states that resume."""

import pytest
from test_changing import changing_job
from training import full, make, train

from octavo.nn import equalized as scales
from octavo.nn.equalized import equalized_layers
from octavo.numerics import equalized
from octavo.parallel import Parallel, parallelize
from octavo.parallel.fsdp import parameters_in_fp8

pytestmark = pytest.mark.dist

SETTINGS = {"off": {"fp8_comm": "off"}, "gather": {"fp8_comm": "gather"}, "ddp": {"dp_replicate": 2, "dp_shard": 1}}


def job(settings, steps, micros=2, **options):
    """Losses, states and the scales' sharing after some steps, and names of weights gathered in FP8."""
    model = make(equalized("rowwise", every=4), **options)
    for block in model.blocks:  # an outlier channel in the input of each layer
        block.norm.weight.data[5] = block.up.bias.data[7] = 50
    model = parallelize(model, Parallel(**settings))
    inner = getattr(model, "module", model)
    losses = train(model, steps, micros=micros)
    names = [id(layer.equalizer.scales) for _, layer in equalized_layers(inner)]
    return (
        losses,
        scales.state_dict(inner),
        set(parameters_in_fp8(inner)),
        [full(p).sum().item() for p in inner.parameters()],
        len(set(names)),
    )


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_fp8_gathers_of_equalized_weights_are_bitwise_the_plain_ones(gloo, checkpointing):
    results = {
        name: gloo.run(job, 2, SETTINGS[name], 4, checkpointing=checkpointing) for name in ("off", "gather", "ddp")
    }
    for ours, theirs in results.values():
        assert ours[0] != theirs[0]  # each of its own data
        assert [s["exponents"] for s in ours[1].values()] == [s["exponents"] for s in theirs[1].values()]
        assert len(ours[1]) == 4 and all(any(s["exponents"]) for s in ours[1].values())
        assert ours[3] == theirs[3]
    assert results["gather"][0][0] == results["off"][0][0] and results["gather"][0][3] == results["off"][0][3]
    assert results["gather"][0][2] and not results["off"][0][2]
    assert results["gather"][0][1] == results["off"][0][1]


@pytest.mark.thorough
@pytest.mark.parametrize("ties", ["blocks", "inside"])
def test_layers_with_one_weight_have_one_s(gloo, ties):
    options = {"ties": ties, "hidden": 64}
    (off, *_), (gather, *_) = (gloo.run(job, 2, SETTINGS[name], 3, 1, **options) for name in ("off", "gather"))
    assert off[4] == gather[4] == 3
    assert off[0] == gather[0]


@pytest.mark.parametrize(
    ("recipes", "count"),
    [
        (("tensorwise", "rowwise_equalized"), 2),
        pytest.param(("tensorwise", "rowwise_equalized", "tensorwise"), 0, marks=pytest.mark.thorough),
        pytest.param(("rowwise_equalized", "rowwise", "rowwise_equalized"), 4, marks=pytest.mark.thorough),
    ],
)
def test_layers_that_begin_and_end_to_equalize(gloo, recipes, count):
    """FP8 gathers follow: the numbers are those of plain gathers, on all ranks."""
    off, gather = (gloo.run(changing_job, 2, SETTINGS[name], *recipes) for name in ("off", "gather"))
    for ours, theirs in zip(gather, off, strict=True):
        assert ours.losses == theirs.losses and len(ours.equalized) == count
        assert all((ours.weights[name] == reference).all() for name, reference in theirs.weights.items())
    assert len(gather[0].gathered[-1]) == 4 and not off[0].gathered[-1]
