import contextlib
import copy
import dataclasses
import io

import pytest
import torch
from models import MLP, assert_same, gradients, llama
from recorded_graph import RecordedGraph
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import octavo
from octavo.kernels.gemm import SCALED_MM
from octavo.kernels.registry import Backend
from octavo.nn import delayed
from octavo.nn.delayed import G, X
from octavo.numerics import RECIPES, QuantSpec, Recipe, sqnr
from octavo.runtime import torch_compat
from tensors import randn

DELAYED = RECIPES["delayed"]
E4M3, E5M2 = (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)


class Reference:
    """Delayed scaling of one linear by the book: a list of maxima per operand, whose largest gives the next scale."""

    def __init__(self, weight, window=16, margin=0):
        self.w, self.window, self.margin = weight.clone(), window, margin
        self.seen = {"x": [], "g": []}

    def cast(self, t, form, amax):
        dtype, most = form
        scale = max(amax / most, 2.0**-126)
        inverse = torch.tensor(1.0 / float(torch.tensor(scale)), dtype=torch.float32)
        q = (t * inverse).clamp(-most, most).to(dtype).float()
        return q.double() * float(torch.tensor(scale))

    def delay(self, name, t, form):
        now, past = float(t.abs().max()), max(self.seen[name], default=0.0)
        self.seen[name] = [now, *self.seen[name]][: self.window]
        return self.cast(t, form, past * 2.0**self.margin if past > 0 else now)

    def step(self, x, g):
        xq, wq = self.delay("x", x, E4M3), self.cast(self.w, E4M3, float(self.w.abs().max()))
        gq = self.delay("g", g, E5M2)
        return (xq @ wq.t()).float(), (gq @ wq).float(), (gq.t() @ xq).float()


def taken(layer, x, g):
    """Y, ∂X and ∂W of one pass."""
    x = x.clone().requires_grad_()
    layer.weight.grad = None
    y = layer(x)
    y.backward(g)
    return y.detach(), x.grad, layer.weight.grad


@pytest.mark.parametrize(("window", "margin"), [(16, 0), (3, 2)])
def test_thirty_steps_of_the_reference(window, margin):
    recipe = dataclasses.replace(DELAYED, name="mine", history=window, margin=margin)
    layer = octavo.convert(nn.Linear(48, 32, bias=False), recipe, verbose=False)
    reference = Reference(layer.weight.detach(), window, margin)
    for step in range(30):
        strength = 1 + 9 * (step % 7 == 3)  # comes, stays in the window, and goes
        x, g = strength * randn(24, 48, seed=step), 1e-3 * strength * randn(24, 32, seed=100 + step)
        for got, want in zip(taken(layer, x, g), reference.step(x, g), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())
        with torch.no_grad():
            layer.weight -= 0.1 * layer.weight.grad
        reference.w = layer.weight.detach().clone()
    amaxes = torch.tensor(delayed.state_dict(layer)[""])
    assert amaxes[:, 1:].tolist() == [reference.seen["x"], reference.seen["g"]]
    assert amaxes[:, 0].tolist() == [0, 0]


def test_a_sudden_jump_is_cut_and_the_next_step_is_not():
    layer = octavo.convert(nn.Linear(64, 32, bias=False), "delayed", verbose=False)
    x, g = randn(64, 64), randn(64, 32, seed=1)
    quality, cut = [], []
    for factor in (1, 1, 100, 100, 1):
        scale = delayed.current_scale(layer, X, factor * x)
        cut.append((factor * x.abs() > 448 * 1.0001 * scale).float().mean().item())
        y, _, _ = taken(layer, factor * x, g)
        assert y.isfinite().all()
        quality.append(sqnr(factor * x @ layer.weight.detach().t(), y))
    assert cut[:2] == [0, 0] and cut[2] > 0.9 and cut[3:] == [0, 0]
    assert quality[2] < 3
    assert min(quality[0], quality[1], quality[3]) > 28
    assert quality[4] > 28  # a window too wide by 100 costs next to nothing: E4M3 has an exponent


def test_current_scale_is_what_products_read():
    layer = octavo.convert(nn.Linear(64, 32, bias=False), "delayed", verbose=False)
    read = []
    backend = SCALED_MM.backends["reference"]
    for step in range(3):
        x, g = (1 + step) * randn(16, 64, seed=step), randn(16, 32, seed=9 + step)
        scales = [delayed.current_scale(layer, X, x)]
        y = layer(x)
        y.register_hook(lambda grad: scales.append(delayed.current_scale(layer, G, grad)))  # noqa: B023
        with_scales = Backend(name="reference", run=lambda *a: read.append(a[0].scale) or backend.run(*a))
        SCALED_MM._forced.append(with_scales)
        try:
            layer(x).backward(g)
        finally:
            SCALED_MM._forced.pop()
        assert torch.equal(read[-2], scales[0])
        y.backward(g)
        assert torch.equal(read[-1], scales[1])
    assert delayed.current_scale(octavo.convert(nn.Linear(4, 4), verbose=False), X, randn(2, 4)) is None


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_stays_visible_and_out_of_the_history(bad):
    layer = octavo.convert(nn.Linear(64, 32, bias=False), "delayed", verbose=False)
    x, g = randn(16, 64), randn(16, 32, seed=1)
    first = taken(layer, x, g)
    broken, broken_g = x.clone(), g.clone()
    broken[3, 5] = broken_g[2, 1] = bad
    y, dx, dw = taken(layer, broken, broken_g)
    assert y[3].isnan().all() and torch.equal(y[:3], first[0][:3])
    assert dx[2].isnan().all() and torch.equal(dx[3:], first[1][3:]) and dw.isnan().any()
    assert torch.tensor(delayed.state_dict(layer)[""]).isfinite().all()
    for got, want in zip(taken(layer, x, g), first, strict=True):
        assert torch.equal(got, want)


def passes(model, ids, checkpointing=None):
    """Losses, gradients and histories of passes over a model's ids, one after the other."""
    for block in model.model.layers if checkpointing else ():
        block.forward = checkpointing(block.forward)
    losses = []
    for step, part in enumerate(ids):
        loss = model(part, labels=part, use_cache=False).loss * (1 + step)
        loss.backward()
        losses.append(loss.item())
    return losses, gradients(model), delayed.state_dict(model)


def full(forward):
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def selective(forward):
    def policy(context, op, *args, **kwargs):
        kept = op == torch.ops.octavo.scaled_mm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return lambda *args, **kwargs: checkpoint(
        forward, *args, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy), **kwargs
    )


@pytest.mark.parametrize("checkpointing", [full, selective])
def test_checkpointing_changes_no_bit_and_records_once(checkpointing):
    ids = torch.randint(128, (4, 2, 16), generator=torch.Generator().manual_seed(0))
    plain = octavo.convert(llama(), "delayed", verbose=False)
    losses, grads, maxima = passes(plain, ids)
    checkpointed = passes(octavo.convert(llama(), "delayed", verbose=False), ids, checkpointing)
    assert (checkpointed[0], checkpointed[2]) == (losses, maxima)
    assert_same(grads, checkpointed[1])
    assert len(maxima) == 14 and all(sum(value > 0 for value in rows[G]) == 4 for rows in maxima.values())


def test_reentrant_checkpointing_has_the_same_scales():
    layer = octavo.convert(nn.Linear(64, 32, bias=False), "delayed", verbose=False)
    other = copy.deepcopy(layer)
    for step in range(3):
        x, g = (1 + step) * randn(16, 64, seed=step).requires_grad_(), randn(16, 32, seed=5)
        again = x.detach().requires_grad_()
        layer(x).backward(g)
        checkpoint(other, again, use_reentrant=True).backward(g)
        assert torch.equal(layer.weight.grad, other.weight.grad)
    assert delayed.state_dict(layer) == delayed.state_dict(other)


def test_a_layer_used_twice_in_a_pass_has_one_scale_in_it():
    layer = octavo.convert(nn.Linear(32, 32, bias=False), "delayed", verbose=False)
    other = copy.deepcopy(layer)
    x = randn(8, 32).requires_grad_()
    for factor in (1, 3, 2):
        layer(5 * layer(factor * x)).sum().backward()
        inner = checkpoint(other, factor * x, use_reentrant=False)  # made again after the outer's backward
        checkpoint(other, 5 * inner, use_reentrant=False).sum().backward()
        assert torch.equal(layer.weight.grad, other.weight.grad)
    rows = delayed.state_dict(layer)[""]
    assert rows == delayed.state_dict(other)[""]
    assert all([value > 0 for value in row] == [False] + 3 * [True] + 13 * [False] for row in rows)


def test_evaluation_uses_the_history_and_records_nothing():
    layer = octavo.convert(nn.Linear(64, 32, bias=False), "delayed", verbose=False)
    x, g = randn(16, 64), randn(16, 32, seed=1)
    taken(layer, x, g)
    before, closed = copy.deepcopy(layer.amax_history.amaxes), layer.amax_history.backward_ran
    layer.eval()
    with torch.no_grad():
        assert sqnr(10 * x @ layer.weight.t(), layer(10 * x)) < 6  # cut
    with torch.inference_mode():
        layer(10 * x)
    taken(layer, 10 * x, g)
    assert torch.equal(layer.amax_history.amaxes, before) and layer.amax_history.backward_ran == closed
    fresh = octavo.convert(nn.Linear(64, 32), "delayed", verbose=False).eval()
    fresh(x)
    assert fresh.amax_history.amaxes is None


@pytest.mark.parametrize("mode", ["evaluation", "reentrant"])
def test_an_empty_history_scales_by_the_current_amax(mode):
    """A history of zeros: after a forward without a backward, a synchronization of ranks, or a load."""
    layer = octavo.convert(nn.Linear(64, 32, bias=False), "delayed", verbose=False)
    x, g = randn(16, 64), randn(16, 32, seed=1)
    first = taken(copy.deepcopy(layer), x, g)
    delayed.load_state_dict(layer, {"": [[0.0] * 17] * 2})
    if mode == "evaluation":
        results = taken(layer.eval(), x, g)
        assert not layer.amax_history.amaxes.any()
    else:
        leaf = x.clone().requires_grad_()
        y = checkpoint(layer, leaf, use_reentrant=True)
        y.backward(g)
        results = y, leaf.grad, layer.weight.grad
    assert all(torch.equal(got, want) for got, want in zip(results, first, strict=True))


def test_siblings_share_their_input_and_have_one_history():
    mlp = octavo.convert(MLP(), "delayed", verbose=False)
    alone = octavo.convert(MLP(), "delayed", verbose=False)
    for step in range(3):
        x = ((1 + step) * randn(8, 64, seed=step)).requires_grad_()
        mlp(x * 1).sum().backward()
        alone(x).sum().backward()  # a leaf: each quantizes it by itself
    rows = delayed.state_dict(mlp)
    assert rows["gate_proj"][X] == rows["up_proj"][X]
    assert rows == delayed.state_dict(alone)
    assert_same(gradients(mlp), gradients(alone))


def test_a_history_is_no_part_of_the_model():
    layer = octavo.convert(nn.Linear(64, 32), "delayed", verbose=False)
    names, keys = dict(layer.named_buffers()), list(layer.state_dict())
    taken(layer, randn(16, 64), randn(16, 32))
    assert dict(layer.named_buffers()) == names == {} and list(layer.state_dict()) == keys == ["weight", "bias"]
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    rows = delayed.state_dict(layer)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert delayed.state_dict(other) == rows
        taken(other, 9 * randn(16, 64), randn(16, 32))
    assert delayed.state_dict(layer) == rows
    layer.bfloat16()
    assert layer.amax_history.amaxes.dtype == torch.float32 and delayed.state_dict(layer) == rows
    octavo.revert(layer)
    assert "amax_history" not in vars(layer)


def test_a_change_of_recipe_begins_anew():
    model = octavo.convert(MLP(), "delayed", verbose=False)
    model(randn(8, 64)).sum().backward()
    octavo.nn.change_recipe(model, "up_proj", "rowwise", reason="a test")
    octavo.nn.change_recipe(model, "up_proj", "delayed", reason="a test")
    assert set(delayed.state_dict(model)) == {"gate_proj", "down_proj"}


@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_a_step_without_values_leaves_the_history_alone(kind):
    model = octavo.convert(nn.Sequential(nn.Linear(64, 64)), "delayed")
    model(torch.randn(8, 64)).sum().backward()
    before = delayed.state_dict(model)
    assert before
    if kind == "meta":
        other = copy.deepcopy(model).to("meta")
        other(torch.empty(8, 64, device="meta")).sum().backward()
        assert delayed.state_dict(other) == before
    else:
        with torch_compat.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            x = mode.from_tensor(torch.randn(8, 64))
            torch.autograd.grad(model(x).sum(), tuple(model.parameters()))
        assert delayed.state_dict(model) == before
        assert type(model[0].amax_history.amaxes) is torch.Tensor


def test_histories_travel_as_numbers():
    model, other = (octavo.convert(MLP(), "delayed", verbose=False) for _ in range(2))
    for step in range(2):
        model(randn(8, 64, seed=step)).sum().backward()
    rows = delayed.state_dict(model)
    delayed.load_state_dict(other, rows | {"elsewhere": [[0.0], [0.0]]})
    assert delayed.state_dict(other) == rows
    for each in (model, other):
        each.zero_grad()
        each(3 * randn(8, 64, seed=5)).sum().backward()
    assert_same(gradients(model), gradients(other))
    del rows["up_proj"]
    delayed.load_state_dict(other, rows)
    assert delayed.state_dict(other) == rows | {"up_proj": [[0.0] * 17] * 2}
    for wrong in ([[1.0], [1.0]], [[float("nan")] * 17] * 2, [[-1.0] * 17] * 2):
        with pytest.raises(ValueError, match="amax history of up_proj must be two lists of 17 finite"):
            delayed.load_state_dict(other, {"up_proj": wrong})
    assert delayed.state_dict(octavo.convert(MLP(), verbose=False)) == {}


def test_a_history_stays_where_it_is():
    layer = octavo.convert(nn.Linear(64, 32, bias=False), dataclasses.replace(DELAYED, name="short", history=3))
    taken(layer, randn(8, 64), randn(8, 32))
    history, rows = layer.amax_history, delayed.state_dict(layer)
    held, address = history.amaxes, history.amaxes.data_ptr()
    for step in range(5):
        taken(layer, randn(8, 64, seed=step), randn(8, 32, seed=9 + step))
        history.to(torch.device("cpu"))
    delayed.reduce_amaxes([history], lambda maxima: maxima.mul_(2), torch.device("cpu"))
    expected = 2 * max(randn(8, 64, seed=4).abs().max().item(), 0)
    assert history.amaxes[X, 1].item() == expected
    delayed.load_state_dict(layer, {})
    assert not history.amaxes.any()
    delayed.load_state_dict(layer, rows)
    assert delayed.state_dict(layer) == rows
    assert history.amaxes is held and history.amaxes.data_ptr() == address


def test_replays_of_a_captured_pass_move_the_history(monkeypatch):
    monkeypatch.setattr(delayed, "disable_current_modes", contextlib.nullcontext)  # a graph captures these, too
    layer = octavo.convert(nn.Linear(64, 32), dataclasses.replace(DELAYED, name="short", history=3), verbose=False)
    eager = copy.deepcopy(layer)
    x, g = randn(8, 64), randn(8, 32)
    taken(layer, x, g), taken(eager, x, g)  # the pass before
    with RecordedGraph() as graph:
        captured = taken(layer, x, g)
    taken(eager, x, g)
    for step, factor in enumerate((1, 100, 1, 1, 1, 1, 0.01, 0.01, 0.01)):
        x.copy_(factor * randn(8, 64, seed=step))
        g.copy_(factor * randn(8, 32, seed=100 + step))
        graph.replay()
        for got, want in zip(captured, taken(eager, x, g), strict=True):
            assert torch.equal(got, want)
        assert delayed.state_dict(layer) == delayed.state_dict(eager)
    taken(layer, x, g), taken(eager, x, g)  # eager passes go on from there
    assert delayed.state_dict(layer) == delayed.state_dict(eager)


def test_a_graph_captures_whole_passes_only(monkeypatch):
    layer = octavo.convert(nn.Linear(64, 32), "delayed", verbose=False)
    x = randn(8, 64)
    capturing = [True]
    monkeypatch.setattr(delayed, "is_capturing", lambda device: capturing[0])
    with pytest.raises(RuntimeError, match="no amax history yet: run one forward and backward"):
        layer(x)
    capturing[0] = False
    layer(x)
    capturing[0] = True
    with pytest.raises(RuntimeError, match="the current pass began outside of the CUDA graph"):
        layer(x)
    capturing[0] = False
    layer(x).sum().backward()
    capturing[0] = True
    (layer(x) + layer(x)).sum().backward()  # two uses in the captured pass
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    capturing[0] = False
    layer(x).sum().backward()
    assert [sum(value > 0 for value in row) for row in delayed.state_dict(layer)[""]] == [4, 4]


def test_ranks_end_the_passes_of_replays():
    layer = octavo.convert(nn.Linear(64, 32), "delayed", verbose=False)
    layer(randn(8, 64)).sum().backward()
    history = layer.amax_history
    history.captured = True
    for passes in (2, 3):  # replays set no attribute
        delayed.reduce_amaxes([history], lambda maxima: maxima, torch.device("cpu"))
        history.amaxes[:, 0] = 1.0
        assert history.amaxes.count_nonzero() == 2 * passes


def test_high_precision_wgrad_and_frozen_layers_have_histories_too():
    hp = dataclasses.replace(DELAYED, name="hp", wgrad_g=None, wgrad_x=None)
    for recipe, trained in ((hp, True), (DELAYED, False)):
        layer = octavo.convert(nn.Linear(64, 32, bias=False), recipe, verbose=False)
        layer.weight.requires_grad_(trained)
        for step in range(2):
            x = (1 + step) * randn(8, 64).requires_grad_()
            layer(x).sum().backward()
        assert [sum(value > 0 for value in row) for row in delayed.state_dict(layer)[""]] == [2, 2]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.filterwarnings("default")
def test_compiled_code_refuses_or_runs_eagerly():
    model = octavo.convert(MLP(), "delayed", verbose=False)
    eager = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    for step in range(2):
        x = (1 + step) * randn(8, 64)
        compiled(x).sum().backward()
        eager(x).sum().backward()
    assert_same(gradients(model), gradients(eager))
    assert delayed.state_dict(model) == delayed.state_dict(eager)
    torch._dynamo.reset()  # which has learned that it runs eagerly
    with pytest.raises(Exception, match="keeps an amax history between steps.*tensorwise"):
        torch.compile(octavo.convert(MLP(), "delayed", verbose=False), backend="eager", fullgraph=True)(randn(8, 64))


def test_a_tiny_model_learns_as_with_scales_just_in_time():
    ends = {}
    for name in ("tensorwise", "delayed"):
        model = octavo.convert(MLP(), name, verbose=False)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        target = randn(64, 64, seed=1) / 8
        for step in range(60):
            x = randn(64, 64, seed=10 + step)
            loss = (model(x) - x @ target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ends[name] = loss.item()
    assert ends["delayed"] == pytest.approx(ends["tensorwise"], rel=0.02)
    assert ends["delayed"] < 0.9  # of 1.0 for an output of zeros


def test_conv1d_has_a_history_too():
    from transformers.pytorch_utils import Conv1D

    layer = octavo.convert(Conv1D(32, 64), "delayed", verbose=False)
    for factor in (1, 100):
        y = layer(factor * randn(16, 64))
        y.sum().backward()
    assert sqnr(100 * randn(16, 64) @ layer.weight.detach() + layer.bias.detach(), y) < 3
    assert [value > 0 for value in delayed.state_dict(layer)[""][X]] == [False, True, True] + 14 * [False]


def test_recipes_with_a_history_are_checked_and_stored():
    mine = dataclasses.replace(DELAYED, name="mine", history=4, margin=1)
    assert Recipe.from_json(mine.to_json()) == mine and mine.to_json()["margin"] == 1
    assert "history" not in RECIPES["rowwise"].to_json()
    row = QuantSpec.parse("e4m3/row")
    for changes, message in (
        ({"history": -1}, "history and margin must be 0 or more"),
        ({"history": 0, "margin": 1}, "margin needs a history"),
        ({"x": row, "wgrad_x": row}, "X and G need one spec each, by tensor"),
        ({"wgrad_g": row}, "X and G need one spec each"),
        ({"w": row, "dgrad_w": row}, "no scales of W can be folded"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(DELAYED, **changes)


def test_the_class_goes_with_the_recipe_and_a_wrong_one_is_an_error():
    x, model = randn(4, 64), octavo.convert(MLP(), verbose=False)
    for recipe, owner in (("delayed", delayed.DelayedLinear), ("mxfp8", octavo.nn.Linear)):
        octavo.nn.change_recipe(model, "up_proj", recipe, reason="a test")
        assert isinstance(model.up_proj, owner) and isinstance(model.up_proj, delayed.Delayed) == (recipe == "delayed")
    model.up_proj.recipe = DELAYED
    with pytest.raises(
        ValueError, match="'delayed' needs an amax history, which a Linear does not keep.*DelayedLinear"
    ):
        model(x)
    layer = octavo.convert(nn.Linear(64, 64), "delayed", verbose=False)
    layer.recipe = RECIPES["rowwise"]  # scaled just in time
    assert torch.equal(layer(x), octavo.nn.linear(x, layer.weight, layer.bias, layer.recipe))
    assert delayed.state_dict(layer) == {} and delayed.current_scale(layer, X, x) is None


def test_a_changed_class_is_not_exchanged():
    layer = octavo.convert(nn.Linear(64, 64), verbose=False)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    octavo.nn.change_recipe(layer, "", "mxfp8", reason="needs no other class")
    with pytest.raises(ValueError, match="became a ParametrizedLinear after it was converted"):
        octavo.nn.change_recipe(layer, "", "delayed", reason="a test")
    assert layer.recipe == RECIPES["mxfp8"]
