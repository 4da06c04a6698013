"""Delayed scaling on ranks: one history for all, and weights that travel in FP8 as those of `tensorwise` do."""

import pytest
from training import backend_options, make, train

from octavo.nn import change_recipe, delayed
from octavo.parallel import Parallel, parallelize
from octavo.parallel.fsdp import parameters_in_fp8

pytestmark = pytest.mark.dist

SETTINGS = {"off": {"fp8_comm": "off"}, "gather": {"fp8_comm": "gather"}, "ddp": {"dp_replicate": 2, "dp_shard": 1}}


def delayed_job(settings, checkpointing):
    """Losses and histories of 3 steps of 2 micro-batches, and names of weights gathered in FP8."""
    model = parallelize(make("delayed", checkpointing=checkpointing), Parallel(**settings))
    inner = getattr(model, "module", model)
    losses = train(model, 3, micros=2)
    return losses, delayed.state_dict(inner), set(parameters_in_fp8(inner))


@pytest.mark.thorough
@pytest.mark.parametrize("checkpointing", [False, True])
def test_ranks_have_one_history(gloo, checkpointing):
    results = {name: gloo.run(delayed_job, 2, SETTINGS[name], checkpointing) for name in ("off", "gather", "ddp")}
    for (losses, mine, _), (others, theirs, _) in results.values():
        assert losses != others  # each of its own data
        assert len(mine) == 4
        for name in mine:
            for x_or_g, other in zip(mine[name], theirs[name], strict=True):
                assert [value > 0 for value in x_or_g] == [False] + 6 * [True] + 10 * [False]
                assert x_or_g[2:] == other[2:]  # the last pass is put together when the next begins
        assert any(mine[name][0][1] != theirs[name][0][1] for name in mine)
    assert [losses for losses, *_ in results["gather"]] == [losses for losses, *_ in results["off"]]
    assert results["gather"][0][2] and not results["off"][0][2]


def changed_job(settings, recipes, backend):
    """Losses of 3 steps in the last of some recipes, changed to one after the other."""
    model = parallelize(make(recipes[0], blocks=1), Parallel(**settings))
    inner = getattr(model, "module", model)
    for recipe in recipes[1:]:
        for name in ("blocks.0.up", "blocks.0.down"):
            change_recipe(inner, name, recipe, reason="a test")
    if backend is not None:
        inner.compile(backend=backend)
    with backend_options(backend):
        return train(model, 3)


@pytest.mark.parametrize(
    ("settings", "backend"),
    [
        ("off", None),
        pytest.param("ddp", None, marks=pytest.mark.thorough),
        pytest.param("off", "eager", marks=pytest.mark.slow),
    ],
)
def test_ranks_share_what_a_change_of_recipe_begins(gloo, settings, backend):
    expected = gloo.run(changed_job, 2, SETTINGS[settings], ["delayed"], None)
    assert gloo.run(changed_job, 2, SETTINGS[settings], ["rowwise", "delayed"], backend) == expected
    ranks = gloo.run(changed_job, 2, SETTINGS[settings], ["delayed", "rowwise"], backend)
    assert ranks == gloo.run(changed_job, 2, SETTINGS[settings], ["rowwise"], None)
