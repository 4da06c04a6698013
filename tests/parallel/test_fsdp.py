"""Models that are awkward to cut into pieces, their state, and what else is done to a model that is sharded.

And training on many ranks, which is training on one: the same losses, whatever is sharded, gathered in FP8, or
recomputed. Where gradients of two are added, at each place, a sum has one value, and everything is the same to the bit:
2 ranks, and 2 × 2. Of four in a row the sum depends on their order, which is Gloo's; then one process that adds them in
another order says how far apart two such runs may be.
"""

import os
import time
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from training import WIDTH, full, loss_of, make, one_process, optimizer_of, run, share, train, whole

import octavo
from octavo.parallel import Parallel, parallelize
from octavo.parallel.fsdp import parameters_in_fp8
from octavo.tensor import local_tensor
from processes import Failed, on_ranks
from tensors import same, saved_and_loaded

pytestmark = pytest.mark.dist
WEIGHTS = [f"blocks.{i}.{name}.weight" for i in range(2) for name in ("up", "down")]


# --- models that are awkward to cut into pieces ---


@pytest.mark.thorough
@pytest.mark.parametrize(("world", "hidden", "recipe"), [(2, 63, "tensorwise"), (4, 65, "rowwise"), (4, 3, "rowwise")])
def test_rows_that_do_not_divide(gloo, world, hidden, recipe):
    """63 rows on 2 ranks, 65 on 4, 3 rows on 4: a shard is padded on the wire, or empty."""
    options = {"steps": 5, "optimizer": "sgd", "hidden": hidden, "recipe": recipe}
    options["width"] = min(WIDTH, 4 * hidden)  # else they are too narrow for FP8
    expected, parameters = one_process(world, **options)
    by_gather = {}
    for comm in ("off", "gather"):
        ranks = gloo.run(run, world, {"fp8_comm": comm}, options, WEIGHTS if comm == "gather" else [])
        by_gather[comm] = [losses for losses, _ in ranks]
        for name, value in ranks[0][1].items():
            assert value.shape == parameters[name].shape
    assert by_gather["off"] == by_gather["gather"]
    if world == 2:
        assert by_gather["gather"] == expected
    assert torch.tensor(by_gather["gather"]) == pytest.approx(torch.tensor(expected), abs=2e-4)


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.full((2,), 1.5)), nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.linear(x) * self.scale


class Routed(nn.Module):
    """A block with a router in float32, as Transformers keeps those of DeepSeek-V3."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = Router()
        self.to(torch.bfloat16)
        self.gate.float()

    def forward(self, x):
        weight = self.gate(x.float()).softmax(-1)[..., :1].to(x.dtype)
        return x + self.down(self.up(x).relu()) * weight


def routed_net():
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(blocks=nn.Sequential(Routed(), Routed()), head=nn.Linear(WIDTH, 4).bfloat16()))


def routed_gradients(model, x):
    model(x).float().square().sum().backward()
    return {name: full(p.grad) for name, p in model.named_parameters()}


@on_ranks(2)
def test_a_router_in_another_dtype_is_its_own_group():
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = routed_gradients(octavo.convert(routed_net(), verbose=False), x)
    model = parallelize(octavo.convert(routed_net(), verbose=False), Parallel(fp8_comm="gather"))
    assert isinstance(model.blocks[0].gate, FSDPModule) and not isinstance(model.blocks[0].up, FSDPModule)
    found = routed_gradients(model, x)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert found[name].dtype == gradient.dtype
        torch.testing.assert_close(found[name], gradient, rtol=1e-2, atol=1e-2 * float(gradient.abs().max()))
    mistakes = {
        "head": lambda m: m.head.register_parameter("scale", nn.Parameter(torch.ones(4))),
        "blocks.1.gate.linear": lambda m: setattr(m.blocks[1].gate.linear, "weight", m.blocks[0].gate.linear.weight),
    }
    for name, spoil in mistakes.items():
        spoil(broken := routed_net())
        message = f"^{name} trains parameters in torch.float32.*give them the dtype of the others before parallelize"
        with pytest.raises(ValueError, match=message):
            parallelize(broken)


@pytest.mark.thorough
@pytest.mark.parametrize("frozen", [("embed", "blocks.1.up", "norm"), ("blocks",)], ids=str)
def test_frozen_parameters(gloo, frozen):
    options = {"steps": 5, "frozen": frozen}
    expected, parameters = one_process(2, **options)
    for comm in ("off", "gather", "on"):
        ranks = gloo.run(run, 2, {"fp8_comm": comm}, options, [] if comm == "off" else WEIGHTS)
        if comm != "on":
            assert [losses for losses, _ in ranks] == expected
            assert same(parameters, ranks[1][1])
        untouched = make().state_dict()
        for name, value in ranks[0][1].items():
            if name.startswith(frozen):
                assert torch.equal(value, untouched[name]), name


@pytest.mark.thorough
@pytest.mark.parametrize("tie", ["head", "blocks", "inside"])
def test_tied_parameters(gloo, tie):
    """Embedding and head; weights of two blocks, which FSDP2 cannot have in two groups; two weights of one block."""
    options = {"steps": 5, "ties": tie, "hidden": 64}
    tied = {"blocks": "blocks.1.up.weight", "inside": "blocks.0.down.weight"}.get(tie)
    names = [name for name in WEIGHTS if name != tied]
    expected, parameters = one_process(2, **options)
    ranks = gloo.run(run, 2, {"fp8_comm": "gather"}, options, names)
    assert [losses for losses, _ in ranks] == expected
    assert same(parameters, {name: ranks[1][1][name] for name in parameters})  # a state has each name of a weight


# --- state ---


@on_ranks(2)
def test_state_dict_is_plain():
    """`state_dict` is that of any FSDP2 model: DTensors of plain tensors, under the model's own names."""
    model = parallelize(make(), Parallel(fp8_comm="gather"))
    train(model, steps=2)
    state = model.state_dict()
    assert list(state) == list(make().state_dict())
    for name, value in state.items():
        assert type(value) is DTensor and type(value.to_local()) is torch.Tensor, name
        assert value.to_local().untyped_storage().data_ptr() == local(model.get_parameter(name)).data_ptr(), name
    loaded = saved_and_loaded(state)
    before = whole(model)
    losses = train(model, steps=2, first=2)
    # Back to what was saved, scales and all: the same two steps again.
    model.load_state_dict(loaded)
    assert same(before, whole(model))
    assert set(parameters_in_fp8(model)) and train(model, steps=2, first=2) == losses
    other = parallelize(make(seed=1), Parallel(fp8_comm="off"))
    other.load_state_dict(loaded)
    assert same(before, whole(other))
    make().load_state_dict(saved_and_loaded(before))


def local(parameter):
    inner = parameter._local_tensor
    return getattr(inner, "local", inner).untyped_storage()


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@on_ranks(2)
def test_writes_to_weights_that_are_gathered_in_fp8(recipe, tmp_path):
    """Writes to shards that leave no trace in the DTensors' versions, and those to gathered weights, which raise."""
    model, off = (parallelize(make(recipe), Parallel(fp8_comm=comm)) for comm in ("gather", "off"))
    plain, tokens, blocks = make(recipe), share(0, 0, 0), [*model.blocks, *off.blocks]
    weights = [getattr(block, name).weight for block in blocks for name in ("up", "down")]
    saved = {name: value.full_tensor() * 8 for name, value in model.state_dict().items()}
    dcp.save({name: value * 8 for name, value in model.state_dict().items()}, checkpoint_id=tmp_path)
    loss_of(model, tokens).backward()
    for write in (lambda w: w.data.mul_(8), lambda w: w.to_local().mul_(8), lambda w: w.mul_(1 / 64)):
        with torch.no_grad():
            for weight in weights:
                write(weight)
            plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
            assert torch.equal(model(tokens), plain(tokens)) and torch.equal(off(tokens), plain(tokens))
    dcp.load(state := model.state_dict(), checkpoint_id=tmp_path)
    plain.load_state_dict(saved)
    assert torch.equal(model(tokens), plain(tokens)) and state
    block = model.blocks[0]
    block.unshard()
    writes = (lambda w: w.mul_(8), lambda w: w.data.mul_(8), lambda w: torch._foreach_mul_([w], 8))
    for write in (*writes, lambda w: setattr(w, "data", torch.zeros(w.shape))):
        with torch.no_grad(), pytest.raises(ValueError, match=r"call reshard\(\) of the modules"):
            write(block.up.weight)
    with torch.no_grad(), pytest.warns(UserWarning, match="what it or its result writes there is lost"):
        block.up.weight[0] = 0.0
    block.reshard()
    assert torch.equal(model(tokens), plain(tokens))


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@on_ranks(2)
def test_inference_clipping_autocast_and_other_optimizers_between_passes(recipe):
    model, plain = parallelize(make(recipe), Parallel(fp8_comm="gather")), make(recipe)
    stepper, expected = optimizer_of("octavo", model.parameters()), optimizer_of("octavo", plain.parameters())
    other = torch.nn.Parameter(torch.ones(1))
    other.grad = torch.ones(1)
    for step in range(3):
        with torch.inference_mode(step == 1), torch.no_grad():
            assert torch.equal(model(share(step, 0, 0)), plain(share(step, 0, 0)))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step == 2):
            losses = [loss_of(m, share(step, 0, 0)) for m in (model, plain)]
        torch.optim.SGD([other], lr=0.1).step()
        for loss, optimizer in zip(losses, (stepper, expected), strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert torch.equal(*losses)
    norms = [full(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)) for m in (model, plain)]
    torch.testing.assert_close(*norms)


@pytest.mark.thorough
@pytest.mark.parametrize(("recipe", "comm"), [("rowwise", "on"), ("tensorwise", "gather")])
@on_ranks(2)
def test_checkpoints_while_a_step_runs(recipe, comm, tmp_path):
    """Checkpoints between forward and backward, within a backward, and in the background while training goes on."""
    model, plain = (parallelize(make(recipe), Parallel(fp8_comm=comm)) for _ in range(2))
    steppers = [optimizer_of("octavo", m.parameters()) for m in (model, plain)]

    def step(number, saves=False):
        losses = [loss_of(m, share(number, dist.get_rank(), 0)) for m in (model, plain)]
        if saves:
            dcp.save(model.state_dict(), checkpoint_id=f"{tmp_path}/{number}")
            hook = model.blocks[1].up.weight.register_post_accumulate_grad_hook(lambda _: model.state_dict())
        for loss, stepper in zip(losses, steppers, strict=True):
            loss.backward()
            stepper.step()
        if saves:
            hook.remove()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        same = [torch.equal(local_tensor(p.grad), local_tensor(other.grad)) for p, other in pairs]
        for stepper in steppers:
            stepper.zero_grad()
        return all(same) and torch.equal(*losses)

    def bits(m, stepper):
        states = stepper.state_dict()["state"]
        tensors = [*m.state_dict().values(), *(states[i][name] for i in sorted(states) for name in sorted(states[i]))]
        return [local_tensor(tensor).clone() for tensor in tensors]

    assert step(0, True) and step(1, True)
    expected = bits(model, steppers[0])
    state = {"model": model.state_dict(), "optimizer": steppers[0].state_dict()}
    saving = dcp.async_save(state, checkpoint_id=f"{tmp_path}/later", process_group=dist.new_group(backend="gloo"))
    assert step(2) and step(3)
    saving.result()
    state = {"model": model.state_dict(), "optimizer": steppers[0].state_dict()}
    dcp.load(state, checkpoint_id=f"{tmp_path}/later")
    model.load_state_dict(state["model"])
    steppers[0].load_state_dict(state["optimizer"])
    assert same(expected, bits(model, steppers[0]))


@on_ranks(2)
def test_a_rank_without_sequences():
    """Gradients where rank 1 has no sequences, beside those of one process that has rank 0's."""
    for settings, recipe in (({"fp8_comm": "gather"}, "tensorwise"), ({"dp_replicate": 2}, "rowwise")):
        model, plain = parallelize(make(recipe), Parallel(**settings)), make(recipe)
        for step in range(2):
            tokens = share(step, 0, 0)
            for m, part in ((model, tokens[: 0 if dist.get_rank() else None]), (plain, tokens)):
                m.zero_grad()
                logits = m(part[:, :-1]).flatten(0, 1)
                nn.functional.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum").backward()
            for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(2 * full(parameter.grad), other.grad), name


def raising_job(alone):
    """A forward that raises in a step: on all ranks, which go on as if it had not been, or on rank 1, which ends."""
    model, plain = (parallelize(make("rowwise_equalized"), Parallel(fp8_comm="on")) for _ in range(2))
    steppers = [optimizer_of("torch", m.parameters()) for m in (model, plain)]  # while parameters are shards
    if alone and dist.get_rank() == 0:
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            train(model, 1)
        assert time.monotonic() - start < 30.0  # of 90
        return
    hook = model.blocks[1].up.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(model, 1)
    if alone:
        os._exit(1)  # as a process does that raises
    hook.remove()
    assert train(model, 3, stepper=steppers[0]) == train(plain, 3, stepper=steppers[1])


def test_a_rank_that_raises_in_a_step(gloo):
    gloo.run(raising_job, 2, False)
    with pytest.raises(Failed) as failed:
        gloo.run(raising_job, 2, True)
    assert "rank 1: its process died" in str(failed.value) and "rank 0" not in str(failed.value)


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@on_ranks(2)
def test_disabled_on_gathered_weights(recipe):
    """Inside `octavo.disabled()` products run in the weights' dtype, on what was gathered: FP8 values."""
    model = parallelize(make(recipe), Parallel(fp8_comm="gather"))
    plain = make(recipe)
    for block in plain.blocks:
        for linear in (block.up, block.down):
            q = octavo.kernels.quantize(linear.weight.detach(), linear.recipe.w)
            linear.weight.data = q.dequantize()
    tokens = share(0, 0, 0)
    with octavo.disabled():
        assert torch.equal(model(tokens), plain(tokens))
        loss_of(model, tokens).backward()
        loss_of(plain, tokens).backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-7, msg=name)
    with octavo.disabled():
        exact = model(tokens)
    assert not torch.equal(model(tokens), exact)


@on_ranks(2)
def test_misuse_of_a_gathered_model():
    """A part of a model called alone, and a recipe that is changed without telling the gather."""
    for recipe in ("rowwise", "tensorwise"):
        model, plain = parallelize(make(recipe), Parallel(fp8_comm="gather")), make(recipe)
        model(share(0, 0, 0))
        x = torch.randn(2, 64)
        assert torch.equal(model.blocks[0](x), plain.blocks[0](x))
        model.blocks[1].up.recipe = octavo.RECIPES["blockwise"]
        with pytest.raises(ValueError, match=r"change a recipe with octavo\.nn\.change_recipe"):
            model(share(0, 0, 0))


@pytest.mark.thorough
@on_ranks(2)
def test_a_recipe_by_row_with_wgrad_in_high_precision_is_gathered():
    options = {"recipe": "rowwise_hp_wgrad", "steps": 4, "parameters": False}
    assert run({"fp8_comm": "off"}, options) == run({"fp8_comm": "gather"}, options)


# --- copies of shards ---


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.inner, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 6).bfloat16()
        self.base.requires_grad_(False)
        self.register_buffer("shift", torch.randn(64))

    def forward(self, x):
        return self.head((self.inner(self.base(x)) + self.shift).bfloat16())


def copies_job():
    """Seeds that differ, and a NaN that one rank alone sees after the reduction."""
    torch.manual_seed(dist.get_rank())
    model = octavo.convert(Mixed(), skip=["head"], frozen="fp8", verbose=False)
    model = parallelize(model, Parallel(dp_replicate=2, dp_shard=2), fp8_comm="gather")
    optimizer = octavo.AdamW([p for p in model.parameters() if p.requires_grad], nonfinite="skip")
    for step in range(3):
        model(torch.ones(4, 64)).float().square().mean().backward()
        if step == 1 and dist.get_rank() == 3:
            model.inner.weight.grad.to_local()[0, 0] = float("nan")
        optimizer.step()
        optimizer.zero_grad()
    base = model.base.weight.to_local()
    parts = [local_tensor(p) for p in model.parameters() if p is not model.base.weight]
    parts += [base.data_.view(torch.uint8), base.scale, model.shift]
    return [part.detach() for part in parts], optimizer.skipped


@pytest.mark.thorough
def test_copies_begin_and_stay_equal(gloo):
    ranks = gloo.run(copies_job, 4)
    for (one, skipped), (other, _) in zip(ranks[:2], ranks[2:], strict=True):
        assert skipped == 1 and same(one, other)


# --- what else is done to a model ---


@on_ranks(2)
def test_clipping_with_a_gradient_that_one_rank_lacks():
    model = parallelize(make(), Parallel(fp8_comm="off"))
    loss_of(model, share(0, 0, 0)).backward()
    octavo.parallel.clip_grad_norm_(model.parameters(), 1.0)
    names, parameters = zip(*model.named_parameters(), strict=True)
    at = names.index("norm.weight")
    if dist.get_rank() == 1:
        parameters[at].grad = None
    with pytest.raises(ValueError, match=rf"parameter {at} of shape \[64\] has no gradient on ranks \[1\], and one on"):
        octavo.parallel.clip_grad_norm_(parameters, 1.0)
    for parameter in parameters[at:]:
        parameter.grad = None  # on both ranks
    assert octavo.parallel.clip_grad_norm_(parameters, 1.0) > 0


@on_ranks(2)
def test_meta_device():
    """A model that never is whole: sharded on the meta device, then given memory and values."""
    with torch.device("meta"):
        model = make()
    model = parallelize(model, Parallel(fp8_comm="gather"))
    model.to_empty(device="cpu")
    assert len(list(parameters_in_fp8(model))) == 4
    twin = parallelize(make(), Parallel(fp8_comm="gather"))
    model.load_state_dict(twin.state_dict())
    assert train(model, 3) == train(twin, 3)


@pytest.mark.thorough
@on_ranks(2)
def test_another_dtype_afterwards():
    """In another dtype afterwards, and what its optimizer keeps is no shard of anything."""
    model = parallelize(make("tensorwise"), Parallel(fp8_comm="gather")).to(torch.bfloat16)
    assert len(list(parameters_in_fp8(model))) == 4
    losses = train(model, 3)
    assert losses == train(parallelize(make("tensorwise", dtype=torch.bfloat16), Parallel(fp8_comm="gather")), 3)
    stepper = torch.optim.AdamW(model.parameters())
    train(model, 1, stepper=stepper)
    assert all(type(state["exp_avg"]._local_tensor) is torch.Tensor for state in stepper.state.values())


# --- training ---


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
        assert same([parameters] * world, [actual for _, actual in ranks])
        return
    actual, exact = torch.tensor(losses), torch.tensor(expected)
    assert torch.equal(actual[:, 0], exact[:, 0])  # FP8 weights are the same ones; gradients come after
    assert not torch.equal(actual, exact)
    assert (actual - exact).abs().max() < 0.05 and actual[:, -1].mean() < 0.6 * actual[:, 0].mean()
    assert same([ranks[0][1]] * world, [parameters for _, parameters in ranks])


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
        assert losses in expected and same(parameters, actual)
