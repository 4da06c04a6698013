"""On ranks as on one process, however weights are gathered: layers that change their recipes, and channel scales."""

from collections import namedtuple

import pytest
import torch
from training import alone, full, make, train, whole

import octavo
from octavo.nn import change_recipe
from octavo.nn import equalized as scales
from octavo.nn.equalized import equalized_layers
from octavo.numerics import equalized
from octavo.parallel import Parallel, parallelize
from octavo.parallel.fsdp import parameters_in_fp8
from tensors import one_thread, same

pytestmark = pytest.mark.dist

LAYERS = ("blocks.0.up", "blocks.1.down")


Run = namedtuple("Run", "losses weights gathered equalized report")


def changing_job(settings, begin, *others, **model):
    """A run of 3 steps in one recipe, and 3 with two layers in each other one; what is gathered in FP8 in each."""
    model = parallelize(make(begin, **model), Parallel(**settings))
    inner = getattr(model, "module", model)
    stepper = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses, gathered = train(model, 3, stepper=stepper), [set(parameters_in_fp8(inner))]
    for number, recipe in enumerate(others, 1):
        for name in LAYERS:
            change_recipe(inner, name, recipe, reason="a test")
        losses += train(model, 3, first=3 * number, stepper=stepper)
        gathered.append(set(parameters_in_fp8(inner)))
    return Run(losses, whole(model), gathered, set(scales.state_dict(inner)), str(octavo.report(inner)))


def changed_alone(begin, end, **model):
    """The same of one process, for two ranks."""

    def between(model):
        for name in LAYERS:
            change_recipe(model, name, end, reason="a test")

    with one_thread():
        return alone(2, steps=6, recipe=begin, between={3: between}, **model)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("begin", "end", "mode"),
    [
        ("tensorwise", "rowwise", "gather"), ("tensorwise", None, "gather"), ("rowwise", "blockwise", "gather"),
        ("rowwise", "tensorwise", "ddp"), ("tensorwise", None, "off"),
    ],
)  # fmt: skip
def test_a_layer_changes(gloo, begin, end, mode):
    settings = {"dp_replicate": 2, "dp_shard": 1} if mode == "ddp" else {"fp8_comm": mode}
    expected, parameters = changed_alone(begin, end)
    ranks = gloo.run(changing_job, 2, settings, begin, end)
    assert [rank.losses for rank in ranks] == expected
    for rank in ranks:
        assert same(parameters, rank.weights)
        if mode == "gather":
            before, after = rank.gathered
            assert {f"{name}.weight" for name in LAYERS} <= before
            assert before - after == ({f"{name}.weight" for name in LAYERS} if end in (None, "blockwise") else set())
        assert "a test" in rank.report


def test_a_layer_of_uneven_shards_changes(gloo):
    expected, _ = changed_alone("rowwise", None, hidden=63)
    ranks = gloo.run(changing_job, 2, {"fp8_comm": "gather"}, "rowwise", None, hidden=63)
    assert [rank.losses for rank in ranks] == expected


def test_a_shared_weight_is_gathered_plain_while_its_layers_differ(gloo):
    for rank in gloo.run(changing_job, 2, {"fp8_comm": "gather"}, "rowwise", "blockwise", ties="blocks"):
        before, after = rank.gathered
        assert "blocks.0.up.weight" in before and "blocks.0.up.weight" not in after


# --- channel equalization: one s for all, also in weights that travel in FP8, and states that resume ---


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
        assert same(theirs.weights, ours.weights)
    assert len(gather[0].gathered[-1]) == 4 and not off[0].gathered[-1]
