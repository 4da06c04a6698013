"""The autopilot moves what crosses a limit, down one rung at a time, alike on all ranks, and remembers it."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import octavo
from octavo.inspect import Autopilot, OperandStats, Thresholds
from octavo.parallel import parallelize

DOWN, UP = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj"


def llama(recipe="tensorwise"):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2, vocab_size=67
    )
    return octavo.convert(LlamaForCausalLM(config), recipe, verbose=False)


def row(layer=DOWN, operand="x", recipe="tensorwise", **changes):
    healthy = OperandStats(
        step=7, layer=layer, operand=operand, recipe=recipe, elements=100, nonfinite=0, amax=1.0, smallest=0.1,
        scale_spread=1.0, underflow=0.0, saturation=0.0, sqnr=28.0,
    )  # fmt: skip
    return replace(healthy, **changes)


def step(model, rank=0):
    tokens = (torch.arange(34).view(2, 17) + 3 * rank) % 67
    loss = model(input_ids=tokens[:, :-1], labels=tokens[:, 1:]).loss
    loss.backward()
    return loss.detach()


def outlier(model, factor):
    """One channel of what `DOWN` reads is so many times larger than the others."""
    scale = torch.ones(256)
    scale[5] = factor
    return model.get_submodule(DOWN).register_forward_pre_hook(lambda _, args: args[0] * scale)


def recipes(model):
    return {found.name: found.recipe for found in octavo.report(model)}


# --- decisions ---


def test_healthy_numbers_move_nothing():
    model = llama()
    pilot = Autopilot(model, every=1)
    before = recipes(model)
    for _ in range(3):
        with pilot.step():
            step(model)
        assert pilot.watch.rows and not pilot.found and not pilot.moved
    assert recipes(model) == before


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sqnr": 12.34}, "x: SQNR 12.3 dB (limit 18)"),
        ({"underflow": 0.25}, "x: underflow 25 % (limit 20)"),
        ({"saturation": 0.5}, "x: saturation 50 % (limit 1)"),
        ({"nonfinite": 3}, "x: 3 values are NaN or infinite"),
        ({"nonfinite": 3, "sqnr": 2.0}, "x: 3 values are NaN or infinite"),
    ],
)
def test_each_limit_moves_a_layer(changes, why):
    model = llama()
    pilot = Autopilot(model)
    (move,) = pilot.act([row(UP), row(**changes), row(operand="w")])
    assert str(move) == f"step 7: {DOWN}: tensorwise → rowwise ({why})"
    assert recipes(model) | {DOWN: "rowwise"} == recipes(model) and recipes(model)[UP] == "tensorwise"
    assert str(move) in next(found.reason for found in octavo.report(model) if found.name == DOWN)


def test_one_rung_at_a_time_down_to_bf16():
    model = llama()
    pilot, seen = Autopilot(model), ["tensorwise"]
    while recipes(model)[DOWN] is not None:
        pilot.act([row(recipe=seen[-1], sqnr=1.0)])
        assert pilot.wants_sample
        seen.append(recipes(model)[DOWN])
    assert seen == ["tensorwise", "rowwise", "blockwise", "rowwise_hp_wgrad", None]
    assert [move.after for move in pilot.moves] == [*seen[1:-1], "bf16"]
    assert not pilot.act([row(UP)]) and not pilot.wants_sample


def test_limits_are_the_users():
    assert not Autopilot(llama(), thresholds=Thresholds(sqnr=10.0)).act([row(sqnr=12.0)])


# --- a model ---


def test_an_outlier_channel_takes_its_layer_to_where_it_does_no_harm():
    model = llama()
    outlier(model, 1e7)
    pilot = Autopilot(model, every=3)
    sampled = []
    for _ in range(9):
        with pilot.step():
            step(model)
        sampled.append(pilot.watch.number if pilot.watch.rows else None)
        assert {move.layer for move in pilot.moved} <= {DOWN}
    # One scale for all, one for a token, one for 128 channels with the outlier: each loses the others. Then bf16.
    assert [move.after for move in pilot.moves] == ["rowwise", "blockwise", "rowwise_hp_wgrad", "bf16"]
    assert "underflow" in pilot.moves[0].why and [move.step for move in pilot.moves] == [1, 1, 1, 1]
    assert sampled == [1, 1, 1, 1, 1, None, 3, None, None]  # a step in which something moved is taken again
    model.zero_grad()
    moved = step(model)
    octavo.convert(octavo.revert(model), "tensorwise", skip=[DOWN], verbose=False)
    model.zero_grad()
    assert torch.equal(moved, step(model))


def test_a_checkpoint_remembers_and_a_request_brings_back():
    model = llama()
    pilot = Autopilot(model)
    pilot.act([row(sqnr=1.0), row(UP, sqnr=1.0)])
    pilot.act([row(recipe="rowwise", sqnr=1.0)])
    state = json.loads(json.dumps(pilot.state_dict()))
    other = llama()
    resumed = Autopilot(other)
    resumed.load_state_dict(state)
    assert recipes(other) == recipes(model) and resumed.moves == pilot.moves and resumed.wants_sample
    (move,) = resumed.restore(UP, step=9)
    assert str(move) == f"step 9: {UP}: rowwise → tensorwise (on request)"
    assert recipes(other) == recipes(model) | {UP: "tensorwise"}
    again = llama()
    twice = Autopilot(again)
    twice.load_state_dict(resumed.state_dict())
    assert recipes(again) == recipes(other)
    twice.restore(step=10)
    assert set(recipes(again).values()) == {"tensorwise", None}
    with pytest.raises(ValueError, match="was not moved"):
        twice.restore(UP, step=11)


def test_what_did_not_help_is_taken_back():
    model = llama()
    pilot = Autopilot(model)
    pilot.act([row(UP, sqnr=1.0, step=6)])
    before = recipes(model)
    pilot.act([row(UP, recipe="rowwise", sqnr=1.0), row(nonfinite=1)])
    pilot.act([row(recipe="rowwise", nonfinite=1)])
    pilot.undo(7)
    assert recipes(model) == before and [move.step for move in pilot.moves] == [6] and not pilot.wants_sample
    pilot.restore(step=8)
    assert set(recipes(model).values()) == {"tensorwise", None}


def test_what_is_not_finite_moves_one_layer_in_a_step():
    model = llama()
    pilot = Autopilot(model)
    assert [move.layer for move in pilot.act([row(nonfinite=1)])] == [DOWN]
    assert not pilot.act([row(UP, nonfinite=1)])  # it was there with the other in another recipe, too
    assert [move.layer for move in pilot.act([row(UP, nonfinite=1)])] == [UP]  # the step is taken anew
    assert [move.layer for move in pilot.act([row(DOWN, recipe="rowwise", nonfinite=1, step=8)])] == [DOWN]


def test_mistakes():
    with pytest.raises(ValueError, match=r"call octavo.convert\(model\) first"):
        Autopilot(torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match="every is a number of steps, 1 or more; got 0"):
        Autopilot(llama(), every=0)
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
    for _ in range(6):
        with pilot.step():
            losses.append(step(model, dist.get_rank()))
        optimizer.step()
        optimizer.zero_grad()
    return [str(move) for move in pilot.moves], recipes(model), losses


@pytest.mark.dist
@pytest.mark.parametrize("fp8_comm", ["off", "gather"])
def test_what_one_rank_sees_moves_the_layer_on_all(gloo, fp8_comm):
    (first, of_first, losses), (second, of_second, _) = gloo.run(ranks_job, 2, fp8_comm)
    assert first == second and of_first == of_second
    assert len(first) == 4 and of_first[DOWN] is None and of_first[UP] == "tensorwise"
    assert torch.stack(losses).isfinite().all()
