"""Fused norms and gated MLPs: as accurate as the model's own operations, in fewer of them, and switchable."""

import copy
import dataclasses

import pytest
import torch
from families import batch_of, model_of, train_step
from test_modules import OddRMSNorm
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.activations.modules import FusedModule
from octavo.nn.memory_audit import saved_for_backward
from octavo.numerics import sqnr
from octavo.planner.trace import trace
from octavo.runtime.torch_compat import TorchDispatchMode, tree_leaves
from tensors import same

FUSED = octavo.Precision(matmul="bf16", activations="fused")
NORMS = {"llama": 3, "qwen3": 5, "gemma3_text": 7, "phi3": 3, "cohere": 2, "mixtral": 3}
by_family = pytest.mark.parametrize("family", NORMS)


def randn(*shape):
    return torch.randn(shape).bfloat16()


def models(family, dtype=torch.bfloat16):
    """The model and the same with fused kernels."""
    own = model_of(family).to(torch.bfloat16).to(dtype)
    return own, octavo.convert(copy.deepcopy(own), precision=FUSED, verbose=False)


def step(module, x, grad):
    """Output and the gradients of input and parameters, in float64."""
    x = x.detach().requires_grad_()
    y = module(x)
    return [t.double() for t in (y, *torch.autograd.grad(y, [x, *module.parameters()], grad.to(y)))]


def ulps(a, b):
    """The largest distance of two bf16 tensors, in bf16 numbers between them."""
    order = [t.contiguous().view(torch.int16).int() for t in (a, b)]
    order = [torch.where(bits < 0, -0x8000 - bits, bits) for bits in order]
    return int((order[0] - order[1]).abs().max())


def products_of(glu, x):
    """act(gate) · up, which the down projection reads."""
    read = []
    hook = glu.down_proj.register_forward_pre_hook(lambda _, args: read.append(args[0].detach()))
    glu(x)
    hook.remove()
    return read[0]


@by_family
def test_each_module_is_within_one_rounding_of_its_own_operations_and_nearer_to_the_exact_ones(family):
    own, model = models(family)
    modules = {name: module for name, module in model.named_modules() if isinstance(module, FusedModule)}
    assert len(modules) == NORMS[family] + (family != "mixtral")
    for name, fused in modules.items():
        plain, glu = own.get_submodule(name), name.endswith("mlp")
        if family == "mixtral":
            nn.init.ones_(plain.weight), nn.init.ones_(fused.weight)
        x = torch.randn(16, 96, 128 if glu else fused.weight.numel()) * torch.randn(16, 96, 1).exp()
        grad, x = torch.randn_like(x), x.bfloat16()
        # Of small gates: PyTorch's gelu cancels below -4.
        values = [products_of(m, x.clamp(-1, 1)) if glu else m(x) for m in (fused, plain)]
        assert ulps(*values) <= (family != "mixtral"), name  # times 1: no second rounding
        truth, mine, actual = (step(m, x.to(t), grad) for m, t in (
            (copy.deepcopy(plain).double(), torch.float64), (plain, x.dtype), (fused, x.dtype)
        ))  # fmt: skip
        for t, a, b in zip(truth, mine, actual, strict=True):
            assert (b - t).norm() <= 1.02 * (a - t).norm(), (name, t.shape)


@by_family
def test_all_gradients_of_a_model_are_as_near_to_float64_as_its_own(family):
    own, model = models(family)
    exact, errors = copy.deepcopy(own).double(), {}
    exact.set_experts_implementation("eager")  # whose grouped products have no float64
    for seed in range(6):
        batch = batch_of(family)
        batch["input_ids"] = batch["input_ids"].roll(seed, 1) ^ seed
        truth, mine, actual = (train_step(m, batch)[1] for m in (exact, own, model))
        assert truth.keys() == mine.keys() == actual.keys()
        for name in truth:
            pair = torch.stack([(g[name].double() - truth[name]).square().sum() for g in (mine, actual)])
            errors[name] = errors.get(name, 0) + pair
    assert all(actual <= 1.6 * mine for mine, actual in errors.values())  # 2 dB: few sums, as of q_norm, are noise
    mine, actual = sum(errors.values())
    assert actual <= 1.05 * mine


class _Elementwise(TorchDispatchMode):
    """Counts operations that are neither views nor products, and the bytes that they read and write."""

    def __init__(self):
        super().__init__()
        self.bytes, self.names = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if not func.is_view and not any(part in name for part in ("mm", "attention", "detach", "_unsafe_view")):
            tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
            self.bytes += sum(t.numel() * t.element_size() for t in tensors)
            self.names.append(name)
        return out


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3"])
def test_less_is_saved_moved_and_launched(family):
    saved, forward, passes, batch = [], [], [], batch_of(family)
    for m in models(family):
        with saved_for_backward(m) as audit:
            m(**batch)
        saved.append(audit.bytes)
        linears = {name: layer for name, layer in m.named_modules() if isinstance(layer, nn.Linear)}
        forward.append(trace(m, linears, lambda m=m: m(**batch)))
        with _Elementwise() as counted:
            train_step(m, batch)
        passes.append(counted)
    assert saved[1] < 0.75 * saved[0] and sum(forward[1].rest) < 0.65 * sum(forward[0].rest)
    before, after = passes
    assert after.bytes < 0.75 * before.bytes
    assert len(before.names) - len(after.names) >= NORMS[family] * 10 + 3  # one each is left, forward and backward
    for name, count in (("rms_norm", NORMS[family]), ("glu", 1)):
        assert [after.names.count(f"octavo::{name}{end}") for end in ("", "_backward")] == [count, count]


@pytest.mark.parametrize("family", ["gemma3_text", "phi3"])
def test_switches(family):
    own, model = models(family)
    batch = batch_of(family)
    expected, fused = train_step(own, batch), train_step(model, batch)
    assert not torch.equal(expected[0], fused[0])
    with torch.inference_mode():  # and without gradients, as reentrant checkpoints run forward first
        assert torch.equal(model.eval()(**batch).last_hidden_state, fused[0])
    copied = copy.deepcopy(model.train())
    assert same(fused[1], train_step(copied, batch)[1])
    with octavo.disabled():
        y, grads = train_step(model, batch)
    assert torch.equal(y, expected[0])
    assert same(expected[1], grads)
    layer = copied.layers[0]
    for reentrant in (False, True):
        layer.forward = lambda *args, reentrant=reentrant, **kwargs: checkpoint(
            lambda *more: type(layer).forward(layer, *more, **kwargs), *args, use_reentrant=reentrant
        )
        assert same(fused[1], train_step(copied, batch)[1])
    octavo.revert(model)
    assert same(expected[1], train_step(model, batch)[1])
    assert not octavo.report(model).activations


def test_what_the_kernels_do_not_take_runs_the_models_own():
    own, model = models("gemma3_text", torch.float32)
    batch = batch_of("gemma3_text")
    with torch.autocast("cpu", torch.bfloat16), _Elementwise() as counted:
        y, grads = train_step(model, batch)
        expected, expected_grads = train_step(own, batch)
    assert counted.names.count("octavo::glu") == 1
    assert counted.names.count("octavo::rms_norm") == 3  # not those of bf16 products, with float32 weights
    assert y.dtype == expected.dtype and sqnr(expected, y) > 40
    assert all(grads[name].dtype == g.dtype and sqnr(g, grads[name]) > 25 for name, g in expected_grads.items())
    with _Elementwise() as counted:
        train_step(model, batch)
    assert "octavo::glu" not in counted.names  # its exponential is less accurate than PyTorch's in float32
    own, model = models("llama")
    x, mlp, calls = torch.randn(2, 3, 128).bfloat16(), model.layers[0].mlp, []
    mlp.act_fn.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(mlp(x), own.layers[0].mlp(x)) and calls
    for m in (own, model):
        parametrize.register_parametrization(m.norm, "weight", nn.Identity())
    assert torch.equal(model.norm(x), own.norm(x))
    assert model.layers[0].input_layernorm(x[:0]).shape == (0, 3, 128)


def test_results_are_laid_out_and_written_in_place_as_the_models_own():
    norms = [m.layers[0].self_attn.q_norm for m in models("gemma3_text")]
    for x in (
        randn(2, 5, 4, 32).transpose(1, 2), randn(2, 3, 4, 5, 32).permute(2, 0, 3, 1, 4), randn(5, 32).expand(3, 5, 32),
        randn(6, 1, 5, 32).transpose(0, 2).expand(5, 3, 6, 32), randn(2, 32, 5).transpose(1, 2), randn(6, 64)[:, ::2],
        randn(4, 2, 64)[..., 32:],
    ):  # fmt: skip
        results = []
        for norm in norms:
            t = x.detach().requires_grad_()
            y = norm(t).mul_(3)
            results.append((y, *torch.autograd.grad(y.square().sum(), t)))
        (y, dx), (fused, fused_dx) = results
        assert y.stride() == fused.stride() and ulps(y.detach(), fused.detach()) <= 1
        assert dx.stride() == fused_dx.stride() and sqnr(dx, fused_dx) > 40
    mlps = [m.layers[0].mlp for m in models("llama")]
    for mlp in mlps:
        mlp.down_proj.register_forward_pre_hook(lambda _, args: (args[0].mul_(2),))
    x = randn(2, 3, 128)
    assert all(sqnr(a, b) > 40 for a, b in zip(*(step(mlp, x, x) for mlp in mlps), strict=True))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
def test_no_frozen_part_makes_a_module_save_more_than_its_own(family):
    with torch.inference_mode():
        inference = randn(6, 128)
    for part in ("norm", "layers.0.mlp"):
        pair = [m.get_submodule(part) for m in models(family)]
        names = [name for name, _ in pair[0].named_parameters()]
        for trained in range(1 << len(names)):
            for x in (randn(6, 128), inference, randn(6, 128).requires_grad_()):
                if not trained and not x.requires_grad:
                    continue
                saved = []
                for module in pair:
                    for index, name in enumerate(names):
                        module.get_parameter(name).requires_grad_(bool(trained >> index & 1))
                    with saved_for_backward(module) as audit:
                        y = module(x if part == "norm" or not x.is_inference() else x.clone())
                    y.sum().backward()
                    saved.append(audit.bytes)
                assert saved[1] <= saved[0], (part, trained, x.requires_grad)


def test_norms_and_joint_gates_save_their_inputs_only():
    model = models("phi3")[1]
    x, mlp = torch.randn(6, 128, dtype=torch.bfloat16, requires_grad=True), model.layers[0].mlp
    with saved_for_backward(mlp) as audit:
        mlp(x)
    assert audit.bytes == 2 * 6 * (128 + 2 * 256 + 256)  # x, gate and up, and h, which down reads
    y = model.norm(x)
    saved = [t for t in y.grad_fn.saved_tensors if t is not None]
    assert saved[0].data_ptr() == x.data_ptr() and [t.numel() for t in saved] == [6 * 128, 128, 6]


def test_second_derivatives_raise_and_transforms_and_graphs_run_the_models_own():
    own, model = (m.layers[0] for m in models("llama"))
    x, nodes = torch.randn(4, 128, dtype=torch.bfloat16, requires_grad=True), []
    for name, text in (("input_layernorm", "a fused norm"), ("mlp", "a gated MLP")):
        fused, plain = getattr(model, name), getattr(own, name)
        with pytest.raises(RuntimeError, match=f"{text}.*no second derivative.*octavo.disabled"):
            torch.autograd.grad(fused(x).sum(), x, create_graph=True)
        with octavo.disabled():
            (dx,) = torch.autograd.grad(fused(x).sum(), x, create_graph=True)
        assert torch.autograd.grad(dx.square().sum(), x)[0].isfinite().all()
        assert torch.equal(torch.func.vmap(fused)(x.detach()), torch.func.vmap(plain)(x.detach()))

        def backend(graph, inputs):
            nodes.extend(str(node.target) for node in graph.graph.nodes)
            return graph

        assert torch.equal(torch.compile(fused, fullgraph=True, backend=backend)(x), plain(x))
        torch._dynamo.reset()
    assert nodes and not any("octavo" in node for node in nodes)


def test_with_fp8_products_plans_and_reports():
    model = model_of("llama", dtype=torch.bfloat16)
    saved = []
    for activations in ("bf16", "fused"):
        octavo.convert(model, "rowwise", activations=activations, verbose=False)
        with saved_for_backward(model) as audit:
            model(**batch_of("llama"))
        saved.append(audit.bytes)
        report = octavo.report(model)
        octavo.revert(model)
    assert saved[1] < 0.7 * saved[0] and report.in_fp8 and {row.recipe for row in report.activations} == {"fused"}
    assert "rowwise" in report.summary and "fused kernels in 4 modules (glu 1, norm 3)" in report.summary
    plan = octavo.Plan.from_json(octavo.nn.rule_plan(model, precision=FUSED).to_json())
    assert "4 run fused kernels" in str(plan) and FUSED.label == "bf16+fused"
    assert octavo.report(octavo.convert(model, plan=plan, verbose=False)).activations == report.activations
    assert not octavo.report(model).in_fp8
    with pytest.raises(ValueError, match="store its activations as 'fused_glu', which does not fit: LlamaMLP"):
        octavo.convert(octavo.revert(model), plan=dataclasses.replace(plan, activations="fp8"), verbose=False)


def test_reasons_of_modules_that_stay():
    model = nn.ModuleDict({"odd": OddRMSNorm(), "torch": nn.RMSNorm(64), "rest": model_of("llama")})
    model["rest"].layers[0].mlp.act_fn = nn.ReLU()
    rows = {row.name: row for row in octavo.report(octavo.convert(model, precision=FUSED, verbose=False)).activations}
    for name, reason in (
        ("odd", "not recognized"), ("torch", "one kernel of PyTorch"), ("rest.layers.0.mlp", "without a kernel")
    ):  # fmt: skip
        assert rows[name].recipe is None and reason in rows[name].reason
    assert rows["rest.norm"].recipe == "fused"
    with pytest.raises(ValueError, match="train as it is.*LayerNorm is one kernel of PyTorch"):
        models("gpt2")
