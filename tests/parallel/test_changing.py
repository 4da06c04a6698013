"""On ranks as on one process, however weights are gathered: layers that change their recipes, and channel scales."""

from collections import namedtuple

import pytest
import torch
from training import alone, make, train, whole

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


SETTINGS = {"off": {"fp8_comm": "off"}, "gather": {"fp8_comm": "gather"}, "ddp": {"dp_replicate": 2, "dp_shard": 1}}
Run = namedtuple("Run", "losses weights gathered equalized scales report")


def job(mode, begin, *others, steps=3, micros=1, outliers=False, **model):
    """A run of some steps in one recipe, and as many with two layers in each other one: what is gathered in FP8 in
    each, the states of equalized layers, and how many channel scales they have.
    """
    model = make(begin, **model)
    for block in model.blocks if outliers else ():  # an outlier channel in the input of each layer
        block.norm.weight.data[5] = block.up.bias.data[7] = 50
    model = parallelize(model, Parallel(**SETTINGS[mode]))
    inner = getattr(model, "module", model)
    stepper = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses, gathered = train(model, steps, micros, stepper=stepper), [set(parameters_in_fp8(inner))]
    for number, recipe in enumerate(others, 1):
        for name in LAYERS:
            change_recipe(inner, name, recipe, reason="a test")
        losses += train(model, steps, first=steps * number, stepper=stepper)
        gathered.append(set(parameters_in_fp8(inner)))
    count = len({id(layer.equalizer.scales) for _, layer in equalized_layers(inner)})
    return Run(losses, whole(model), gathered, scales.state_dict(inner), count, str(octavo.report(inner)))


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
    expected, parameters = changed_alone(begin, end)
    ranks = gloo.run(job, 2, mode, begin, end)
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
    ranks = gloo.run(job, 2, "gather", "rowwise", None, hidden=63)
    assert [rank.losses for rank in ranks] == expected


def test_a_shared_weight_is_gathered_plain_while_its_layers_differ(gloo):
    for rank in gloo.run(job, 2, "gather", "rowwise", "blockwise", ties="blocks"):
        before, after = rank.gathered
        assert "blocks.0.up.weight" in before and "blocks.0.up.weight" not in after


# --- channel equalization: one s for all, also in weights that travel in FP8, and states that resume ---


EQUALIZED = {"begin": equalized("rowwise", every=4), "outliers": True}


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_fp8_gathers_of_equalized_weights_are_bitwise_the_plain_ones(gloo, checkpointing):
    options = EQUALIZED | {"steps": 4, "micros": 2, "checkpointing": checkpointing}
    (off, _), (gather, _), _ = results = [gloo.run(job, 2, mode, **options) for mode in SETTINGS]
    for ours, theirs in results:
        assert ours.losses != theirs.losses  # each of its own data
        exponents = [[state["exponents"] for state in rank.equalized.values()] for rank in (ours, theirs)]
        assert exponents[0] == exponents[1] and len(exponents[0]) == 4 and all(map(any, exponents[0]))
        assert same(ours.weights, theirs.weights)
    assert gather.losses == off.losses and same(off.weights, gather.weights)
    assert gather.gathered[0] and not off.gathered[0] and gather.equalized == off.equalized


@pytest.mark.thorough
@pytest.mark.parametrize("ties", ["blocks", "inside"])
def test_layers_with_one_weight_have_one_s(gloo, ties):
    (off, _), (gather, _) = (gloo.run(job, 2, mode, ties=ties, hidden=64, **EQUALIZED) for mode in ("off", "gather"))
    assert off.scales == gather.scales == 3 and off.losses == gather.losses


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
    off, gather = (gloo.run(job, 2, mode, *recipes) for mode in ("off", "gather"))
    for ours, theirs in zip(gather, off, strict=True):
        assert ours.losses == theirs.losses and len(ours.equalized) == count
        assert same(theirs.weights, ours.weights)
    assert len(gather[0].gathered[-1]) == 4 and not off[0].gathered[-1]
