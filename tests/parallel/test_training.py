"""Training on many ranks is training on one: the same losses, whatever is sharded, gathered in FP8, or recomputed.

Where gradients of two are added, at each place, a sum has one value, and everything is the same to the bit: 2 ranks,
and 2 × 2. Of four in a row the sum depends on their order, which is Gloo's; then one process that adds them in another
order says how far apart two such runs may be.
"""

import pytest
import torch
from training import one_process, run

pytestmark = pytest.mark.dist

MODES = {
    "zero3": (2, {}), "zero2": (2, {"reshard_after_forward": False}), "offload": (2, {"cpu_offload": True}),
    "hsdp": (4, {"dp_replicate": 2, "dp_shard": 2}), "ddp": (2, {"dp_replicate": 2}),
}  # fmt: skip
CASES = [
    ("zero3", "rowwise", "off", False, 1), ("zero3", "rowwise", "gather", True, 4),
    ("zero3", "rowwise", "on", False, 1), ("zero3", "tensorwise", "off", True, 1),
    ("zero3", "tensorwise", "gather", False, 4),
    ("zero2", "rowwise", "gather", False, 1), ("zero2", "tensorwise", "gather", True, 1),
    ("zero2", "rowwise", "on", False, 4), ("offload", "rowwise", "gather", False, 1),
    ("offload", "tensorwise", "on", False, 1), ("hsdp", "rowwise", "gather", False, 4),
    ("hsdp", "tensorwise", "off", False, 1), ("hsdp", "tensorwise", "on", False, 1), ("ddp", "rowwise", "off", True, 4),
    ("ddp", "tensorwise", "off", False, 1), ("ddp", "rowwise", "on", False, 1),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("mode", "recipe", "fp8_comm", "checkpointing", "micros"), CASES)
def test_losses_are_those_of_one_process(gloo, mode, recipe, fp8_comm, checkpointing, micros, compiled):
    """Compiled or not: block by block, as one process compiles them."""
    world, settings = MODES[mode]
    options = {"recipe": recipe, "checkpointing": checkpointing, "micros": micros}
    if compiled:
        options["backend"] = "inductor"
    expected, parameters = one_process(world=world, pairs=True, **options)
    ranks = gloo.run(run, world, {**settings, "fp8_comm": fp8_comm}, options)
    losses = [losses for losses, _ in ranks]
    if fp8_comm != "on":
        assert losses == expected
        for _, actual in ranks:
            assert actual.keys() == parameters.keys()
            assert all(torch.equal(actual[name], parameters[name]) for name in actual)
        return
    actual, exact = torch.tensor(losses), torch.tensor(expected)
    assert torch.equal(actual[:, 0], exact[:, 0])  # FP8 weights are the same ones; gradients come after
    assert not torch.equal(actual, exact)
    assert (actual - exact).abs().max() < 0.05 and actual[:, -1].mean() < 0.6 * actual[:, 0].mean()
    assert all(torch.equal(ranks[0][1][name], other[name]) for _, other in ranks for name in other)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [None, "rowwise", "tensorwise"])
def test_four_ranks_are_within_the_noise_of_adding_in_another_order(gloo, recipe):
    expected = torch.tensor(one_process(world=4, recipe=recipe)[0])
    reverse = torch.tensor(one_process(world=4, recipe=recipe, reverse=True)[0])
    results = {}
    for fp8_comm in ("off",) if recipe is None else ("off", "gather"):
        results[fp8_comm] = [x for x, _ in gloo.run(run, 4, {"fp8_comm": fp8_comm}, {"recipe": recipe})]
    apart = (torch.tensor(results["off"]) - expected).abs().amax(0)
    assert apart[:6].max() < 2e-6
    if recipe is None:
        assert apart.max() < 1e-5
    else:  # a last bit that differs moves a value to the next FP8 one, now or some steps later
        assert apart.max() < max(4 * (reverse - expected).abs().max(), 0.02)
        assert results["gather"] == results["off"]


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [pytest.param("rowwise", marks=pytest.mark.slow), "tensorwise"])
def test_gathering_in_bf16_of_fp32_shards(gloo, recipe):
    """`dtype`: what FSDP2 calls param_dtype. FP8 weights are those of the rounded ones."""
    off, gather = (
        gloo.run(run, 2, {"fp8_comm": comm}, {"recipe": recipe, "dtype": torch.bfloat16, "steps": 8})
        for comm in ("off", "gather")
    )
    assert [x for x, _ in off] == [x for x, _ in gather]
    exact = gloo.run(run, 2, {"fp8_comm": "off"}, {"recipe": recipe, "steps": 8})
    assert off[0][0] != exact[0][0] and off[0][0] == pytest.approx(exact[0][0], abs=0.1)


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", [pytest.param("torch", marks=pytest.mark.slow), "octavo"])
def test_fp8_moments_make_no_difference_between_one_process_and_shards(gloo, optimizer):
    options = {"recipe": "rowwise", "optimizer": optimizer}
    expected, parameters = one_process(world=2, **options)
    for losses, actual in gloo.run(run, 2, {"fp8_comm": "gather"}, options):
        assert losses in expected
        assert all(torch.equal(actual[name], parameters[name]) for name in parameters)
