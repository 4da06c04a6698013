"""A layer that changes its recipe while it is trained: on ranks as on one process, however its weight was gathered."""

import pytest
import torch
from training import alone, make, train, whole

import octavo
from octavo.nn import change_recipe
from octavo.parallel import Parallel, parallelize
from octavo.parallel.fsdp import parameters_in_fp8

pytestmark = pytest.mark.dist

LAYERS = ("blocks.0.up", "blocks.1.down")


def changing_job(settings, begin, end, change):
    """Losses and parameters of 3 steps in one recipe, and 3 with two layers in another."""
    model = parallelize(make(begin, **change.get("model", {})), Parallel(**settings))
    stepper = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = train(model, 3, stepper=stepper)
    inner = model.module if settings.get("dp_replicate", 1) > 1 and settings.get("dp_shard", 1) == 1 else model
    before = set(parameters_in_fp8(inner))
    for name in LAYERS:
        change_recipe(inner, name, end, reason="a test")
    losses += train(model, 3, first=3, stepper=stepper)
    return losses, whole(model), before, set(parameters_in_fp8(inner)), str(octavo.report(inner))


def changed_alone(begin, end, **model):
    """The same of one process, for two ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def between(model):
        for name in LAYERS:
            change_recipe(model, name, end, reason="a test")

    try:
        return alone(2, steps=6, recipe=begin, between={3: between}, **model)
    finally:
        torch.set_num_threads(threads)


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
    ranks = gloo.run(changing_job, 2, settings, begin, end, {})
    assert [losses for losses, *_ in ranks] == expected
    for _, actual, before, after, shown in ranks:
        assert all(torch.equal(actual[name], parameters[name]) for name in parameters)
        if mode == "gather":
            assert {f"{name}.weight" for name in LAYERS} <= before
            assert before - after == ({f"{name}.weight" for name in LAYERS} if end in (None, "blockwise") else set())
        assert "a test" in shown


def test_a_layer_of_uneven_shards_changes(gloo):
    expected, _ = changed_alone("rowwise", None, hidden=63)
    ranks = gloo.run(changing_job, 2, {"fp8_comm": "gather"}, "rowwise", None, {"model": {"hidden": 63}})
    assert [losses for losses, *_ in ranks] == expected


def test_a_shared_weight_is_gathered_plain_while_its_layers_differ(gloo):
    ranks = gloo.run(changing_job, 2, {"fp8_comm": "gather"}, "rowwise", "blockwise", {"model": {"ties": "blocks"}})
    for _, _, before, after, _ in ranks:
        assert "blocks.0.up.weight" in before and "blocks.0.up.weight" not in after
