"""The autopilot moves what FP8 harms to what does not, while that lasts, alike on all ranks, and remembers it."""

import functools
import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import octavo
from octavo.inspect import Autopilot, OperandStats
from octavo.nn.convert import change_recipe
from octavo.parallel import parallelize
from support.llamas import small_llama

DOWN, UP = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj"


def llama(recipe="tensorwise"):
    model = small_llama(intermediate_size=256, num_hidden_layers=1)
    return octavo.convert(model, recipe, verbose=False)


def row(layer=DOWN, operand="x", recipe="tensorwise", **changes):
    healthy = OperandStats(
        step=7, layer=layer, operand=operand, recipe=recipe, elements=100, nonfinite=0, amax=1.0, smallest=0.1,
        scale_spread=1.0, underflow=0.0, saturation=0.0, sqnr=28.0,
    )  # fmt: skip
    return replace(healthy, **changes)


def step(model, rank=0):
    tokens = (torch.arange(34).view(2, 17) + 3 * rank) % 64
    loss = model(input_ids=tokens[:, :-1], labels=tokens[:, 1:]).loss
    loss.backward()
    return loss.detach()


def outlier(model, factor):
    """One channel of what `DOWN` reads is so many times larger than the others."""
    scale = torch.ones(256)
    scale[5] = factor
    return model.get_submodule(DOWN).register_forward_pre_hook(lambda _, args: args[0] * scale)


def recipes(model):
    return {row.name: row.recipe for row in octavo.report(model)}


# --- decisions ---


def suspected(pilot, *rows, **errors):
    """Moves after a look, and another one at the products of the suspects."""
    assert not pilot.act(rows, {}) and pilot.should_repeat
    assert DOWN in pilot.measures
    return pilot.act(rows, {DOWN: errors})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sqnr": 12.34}, "x: SQNR 12.3 dB (limit 18)"),
        ({"underflow": 0.25}, "x: underflow 25 % (limit 20)"),
        ({"saturation": 0.5, "underflow": 0.25}, "x: saturation 50 % (limit 1)"),
    ],
)
def test_harm_behind_each_limit_moves_a_layer(changes, why):
    model = llama()
    pilot = Autopilot(model)
    (move,) = suspected(pilot, row(UP), row(**changes), row(operand="w"), tensorwise=0.5, rowwise=0.1)
    assert str(move) == f"step 7: {DOWN}: tensorwise → rowwise ({why}, product error 0.5 (limit 0.25))"
    assert pilot.should_repeat and recipes(model) | {DOWN: "rowwise"} == recipes(model)
    assert recipes(model)[UP] == "tensorwise"
    assert str(move) in next(row.reason for row in octavo.report(model) if row.name == DOWN)


@pytest.mark.parametrize(
    ("errors", "after"),
    [
        ({"rowwise": 0.9, "blockwise": 0.05, "mxfp8": 0.04}, "blockwise"),
        ({"rowwise": 0.9, "blockwise": 0.2, "mxfp8": 0.04}, "mxfp8"),
        ({"rowwise": 0.9, "blockwise": 0.9, "mxfp8": 0.9, "rowwise_hp_wgrad": 0.03}, "rowwise_hp_wgrad"),
        ({"rowwise": 0.9, "blockwise": 0.9, "mxfp8": 0.9, "rowwise_hp_wgrad": 0.9}, None),
    ],
)
def test_the_recipe_is_the_first_that_does_no_harm_to_these_operands(errors, after):
    model = llama()
    suspected(Autopilot(model), row(underflow=0.9), tensorwise=0.5, **errors)
    assert recipes(model)[DOWN] == after


def test_a_recipe_that_was_left_in_a_step_is_not_taken_in_it_again():
    model = llama()
    pilot = Autopilot(model)
    suspected(pilot, row(underflow=0.9), tensorwise=0.5, rowwise=0.1)
    pilot.act([row(recipe="rowwise", underflow=0.9)], {DOWN: {"tensorwise": 0.1, "rowwise": 0.5, "mxfp8": 0.1}})
    assert recipes(model)[DOWN] == "mxfp8"


def test_a_layer_that_cannot_be_moved_stays_with_a_warning():
    model = llama()
    pilot, down = Autopilot(model), model.get_submodule(DOWN)
    down.forward = functools.partial(down.forward)  # as accelerate's hooks do
    with pytest.warns(UserWarning, match=f"{DOWN}: tensorwise → bf16.*forward that was put on the instance"):
        assert not suspected(pilot, row(underflow=0.9), tensorwise=0.5)
    assert not pilot.should_repeat and not pilot.changes and recipes(model)[DOWN] == "tensorwise"
    step(model)
    assert not pilot.act([row(step=8, underflow=0.9)], {}) and not pilot.should_repeat  # nothing can be done
    state = pilot.state_dict()
    del down.forward
    assert suspected(pilot, row(step=9, underflow=0.9), tensorwise=0.5) and recipes(model)[DOWN] is None
    down.forward = functools.partial(down.forward)
    with pytest.warns(UserWarning, match="bf16 → tensorwise"):
        assert not pilot.restore(step=10)
    del down.forward
    pilot.load_state_dict(state)
    assert recipes(model)[DOWN] == "tensorwise"


@pytest.mark.parametrize("operand", ["x", "w", "dgrad_g"])
def test_what_is_not_finite_is_not_blamed_on_fp8(operand):
    pilot = Autopilot(llama())
    assert not pilot.act([row(underflow=0.9), row(operand=operand, nonfinite=1)], {DOWN: {"tensorwise": 1.0}})
    assert not pilot.should_repeat and pilot.needs_sample  # the first look is still to come
    assert not pilot.act([row(underflow=0.9)], {DOWN: {"tensorwise": 1.0}}, finite=False) and pilot.needs_sample


def test_one_batch_moves_no_layer_for_good():
    model = llama()
    pilot = Autopilot(model)
    suspected(pilot, row(underflow=0.9), tensorwise=0.5, rowwise=0.1)
    assert not pilot.act([row(recipe="rowwise")], {DOWN: {"rowwise": 0.1}}) and not pilot.should_repeat  # once more
    assert pilot.needs_sample and pilot.measures == {DOWN: [octavo.RECIPES["tensorwise"]]}
    (move,) = pilot.act([row(recipe="rowwise", step=8)], {DOWN: {"tensorwise": 0.1}})
    assert str(move).endswith("rowwise → tensorwise (the next batch is not harmed, product error 0.1)") and move.back
    assert recipes(model)[DOWN] == "tensorwise" and not pilot.should_repeat and not pilot.needs_sample


def test_what_lasts_stays_and_comes_back_after_quiet_samples():
    model = llama()
    pilot = Autopilot(model, restore_after=2)
    suspected(pilot, row(underflow=0.9), tensorwise=0.5, rowwise=0.1)
    for number, error in enumerate([0.5, 0.1, 0.2, 0.1], 8):  # the third is too near to the limit
        assert not pilot.act([row(recipe="rowwise", step=number)], {DOWN: {"tensorwise": error}})
    (move,) = pilot.act([row(recipe="rowwise", step=12)], {DOWN: {"tensorwise": 0.1}})
    assert move.back and recipes(model)[DOWN] == "tensorwise" and not pilot.measures


# --- a model ---


def drive(model, pilot, steps):
    """Steps as the docstring of `Autopilot` shows; the numbers of all that were taken, None for unsampled ones."""
    sampled = []
    for _ in range(steps):
        while True:
            with pilot.step():
                step(model)
            sampled.append(pilot.watch.number if pilot.watch.rows else None)
            if not pilot.should_repeat:
                break
            model.zero_grad()
    return sampled


def test_an_outlier_channel_takes_its_layer_to_where_it_does_no_harm():
    model = llama()
    outlier(model, 1e7)
    pilot = Autopilot(model, every=4)
    sampled = drive(model, pilot, 4)
    (move,) = pilot.changes
    assert (move.layer, move.after, move.step) == (DOWN, "rowwise_equalized", 1) and "underflow" in move.why
    # A look, its products, the move; its trial; the next sample.
    assert sampled == [1, 1, 1, 2, None, 4]
    model.zero_grad()
    moved = step(model)
    octavo.convert(octavo.revert(model), "tensorwise", verbose=False)
    change_recipe(model, DOWN, "rowwise_equalized", reason="as moved")
    model.zero_grad()
    assert torch.equal(moved, step(model))


def test_a_checkpoint_remembers_and_a_request_brings_back():
    model = llama()
    pilot = Autopilot(model)
    pilot.watch.number = 7
    both = [row(sqnr=1.0), row(UP, sqnr=1.0)]
    pilot.act(both, {})
    pilot.act(both, {layer: {"tensorwise": 0.5, "mxfp8": 0.1} for layer in (DOWN, UP)})
    state = json.loads(json.dumps(pilot.state_dict()))
    other = llama()
    resumed = Autopilot(other)
    resumed.load_state_dict(state)
    assert recipes(other) == recipes(model) and resumed.changes == pilot.changes and resumed.needs_sample
    assert resumed.watch.number == 7 and resumed.measures.keys() == {DOWN, UP} and resumed.state_dict() == state
    (move,) = resumed.restore(UP, step=9)
    assert str(move) == f"step 9: {UP}: mxfp8 → tensorwise (on request)"
    assert recipes(other) == recipes(model) | {UP: "tensorwise"}
    again = llama()
    twice = Autopilot(again)
    twice.load_state_dict(resumed.state_dict())
    assert recipes(again) == recipes(other)
    twice.restore(step=10)
    assert set(recipes(again).values()) == {"tensorwise", None}
    with pytest.raises(ValueError, match="was not moved"):
        twice.restore(UP, step=11)


def test_loading_takes_back_moves_that_are_not_in_the_checkpoint():
    model = llama()
    pilot = Autopilot(model)
    suspected(pilot, row(sqnr=1.0), tensorwise=0.5, rowwise=0.1)
    state, before = pilot.state_dict(), recipes(model)
    pilot.act([row(UP, sqnr=1.0, step=8)], {})
    pilot.act([row(UP, sqnr=1.0, step=8)], {UP: {"tensorwise": 0.5}})
    assert recipes(model)[UP] is None
    pilot.load_state_dict(state)
    assert recipes(model) == before and pilot.state_dict() == state


def test_mistakes():
    with pytest.raises(ValueError, match=r"call octavo.convert\(model\) first"):
        Autopilot(torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match="every is a number of steps, 1 or more; got 0"):
        Autopilot(llama(), every=0)
    with pytest.raises(ValueError, match="restore_after is a number of samples, 0 or more; got -1"):
        Autopilot(llama(), restore_after=-1)
    state = Autopilot(llama()).state_dict()
    state["moves"] = [{"step": 1, "layer": "x.y", "before": "rowwise", "after": "bf16", "why": ""}]
    with pytest.raises(ValueError, match="the moves are of another model: this one has no 'x.y'"):
        Autopilot(llama()).load_state_dict(state)


# --- ranks ---


def ranks_job(fp8_comm):
    """Moves and losses of a model with an outlier on the second rank alone."""
    model = llama()
    if dist.get_rank() == 1:
        outlier(model, 1e7)
    parallelize(model, fp8_comm=fp8_comm)
    pilot, losses = Autopilot(model, every=1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(4):
        while True:
            with pilot.step():
                losses.append(step(model, dist.get_rank()))
            if not pilot.should_repeat:
                break
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    return [str(move) for move in pilot.changes], recipes(model), losses


@pytest.mark.thorough
@pytest.mark.dist
@pytest.mark.parametrize("fp8_comm", [pytest.param("off", marks=pytest.mark.slow), "gather"])
def test_what_one_rank_sees_moves_the_layer_on_all(gloo, fp8_comm):
    (first, of_first, losses), (second, of_second, _) = gloo.run(ranks_job, 2, fp8_comm)
    assert first == second and of_first == of_second
    assert first and of_first[DOWN] == "rowwise_equalized" and of_first[UP] == "tensorwise"
    assert torch.stack(losses).isfinite().all()
