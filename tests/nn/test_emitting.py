"""Norms and gated MLPs that emit the FP8 form of their result: no bit changes, and linears read it."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.helium.modeling_helium import HeliumRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.moshi.modeling_moshi import MoshiRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3Config, Phi3MLP
from transformers.models.t5.modeling_t5 import T5LayerNorm

import octavo
from octavo.activations import factors
from octavo.kernels import quantize
from octavo.nn import emitting
from octavo.nn.input_casts import AGAIN, TRIES

K, N = 64, 96
NORMS = {
    "llama": lambda: LlamaRMSNorm(K), "olmo": lambda: Olmo2RMSNorm(K), "helium": lambda: HeliumRMSNorm(K),
    "moshi": lambda: MoshiRMSNorm(K), "gemma": lambda: GemmaRMSNorm(K), "t5": lambda: T5LayerNorm(K),
    "cohere": lambda: CohereLayerNorm(K),
}  # fmt: skip


class SwiGlu(nn.Module):
    """up · act(gate), with a function for an activation."""

    def __init__(self):
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(K, N, bias=False), nn.Linear(K, N, bias=False), nn.Linear(N, K)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


MLPS = {
    "llama": lambda: LlamaMLP(LlamaConfig(hidden_size=K, intermediate_size=N, num_attention_heads=2)),
    "phi3": lambda: Phi3MLP(Phi3Config(hidden_size=K, intermediate_size=N)),
    "swiglu": SwiGlu,
}


class Block(nn.Module):
    """Reads a norm three times, then an MLP reads another."""

    def __init__(self, norm="llama", mlp="llama"):
        super().__init__()
        self.norm, self.post = NORMS[norm](), NORMS[norm]()
        for name in ("q", "k", "v"):
            setattr(self, name, nn.Linear(K, K, bias=False))
        self.mlp = MLPS[mlp]()

    def forward(self, x):
        y = self.norm(x)
        x = x + self.q(y) * self.k(y) + self.v(y)
        return x + self.mlp(self.post(x))


def block(emit, *names, dtype=torch.bfloat16, recipe="rowwise", **options):
    torch.manual_seed(0)
    model = Block(*names)
    for p in model.parameters():
        nn.init.normal_(p, 1.0 if p.ndim == 1 else 0.0, 0.3)
    return octavo.convert(model.to(dtype), recipe, emit=emit, verbose=False, **options)


def data(dtype=torch.bfloat16):
    torch.manual_seed(1)
    return torch.randn(2, 24, K).to(dtype).requires_grad_(), torch.randn(2, 24, K).to(dtype)


def results(model, call=None, passes=3, dtype=torch.bfloat16):
    """Outputs and gradients of some passes."""
    x, g = data(dtype)
    out = []
    for _ in range(passes):
        y = (call or model)(x)
        y.backward(g.to(y.dtype))
        out += [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]
        model.zero_grad(), setattr(x, "grad", None)
    return out


def same(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.fixture
def casts(monkeypatch):
    """Counts what is quantized and what is multiplied by the kernel."""
    counted = {"quantize": 0, "multiply": 0}
    import octavo.nn.input_casts as casts_module

    def counting(name, function):
        def call(*args, **kwargs):
            counted[name] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(casts_module, "quantize", counting("quantize", quantize))
    monkeypatch.setattr(emitting, "multiply", counting("multiply", emitting.multiply))
    return counted


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_norms_emit_and_no_bit_changes(norm, dtype, casts):
    plain = results(block("never", norm, dtype=dtype), dtype=dtype)
    before = casts["quantize"]
    assert casts["multiply"] == 0
    assert same(results(block("always", norm, dtype=dtype), dtype=dtype), plain)
    # X of q, gate and down in the first pass; then none. The first pass learns.
    assert before == 9 and casts["quantize"] - before == 3 and casts["multiply"] == 6


@pytest.mark.parametrize("mlp", MLPS)
def test_gated_mlps_emit_and_no_bit_changes(mlp, casts):
    plain = results(block("never", "llama", mlp))
    assert same(results(block("always", "llama", mlp)), plain)
    assert casts["multiply"] == 6


@pytest.mark.parametrize("recipe", octavo.RECIPES)
def test_other_recipes_are_left_alone_or_read_it(recipe, casts):
    plain, model = results(block("never", recipe=recipe)), block("always", recipe=recipe)
    assert same(results(model), plain)
    by_row = recipe in ("rowwise", "rowwise_hp_wgrad")
    assert any(map(emitting.emits, model.modules())) is by_row
    assert casts["multiply"] == (6 if by_row else 0)


def test_backward_saves_the_same_tensors_in_the_same_order():
    """Checkpointing may run the module's own code in forward and the emitting one in backward."""

    def saved(model):
        x, _ = data()
        model(x).sum().backward()  # learns
        seen = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
            model(x)
        return seen

    one, other = saved(block("never")), saved(block("always"))
    assert [(t.shape, t.dtype) for t in one] == [(t.shape, t.dtype) for t in other]
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("norm", ["llama", "olmo", "gemma"])
def test_checkpointing(norm, reentrant, casts):
    plain = results(block("never", norm))
    model = block("always", norm)
    assert same(results(model, lambda x: checkpoint(model, x, use_reentrant=reentrant)), plain)
    assert casts["multiply"] > 3


def test_autocast(casts):
    def call(model):
        def run(x):
            with torch.autocast("cpu", torch.bfloat16):
                return model(x)

        return run

    one, other = block("never", dtype=torch.float32), block("always", dtype=torch.float32)
    assert same(results(one, call(one), dtype=torch.float32), results(other, call(other), dtype=torch.float32))
    assert casts["multiply"] == 6


@pytest.mark.parametrize("frozen", ["weights", "norms", "all but one"])
def test_frozen_parameters(frozen, casts):
    models = block("never"), block("always")
    for model in models:
        for name, p in model.named_parameters():
            kept = {"weights": p.ndim == 1, "norms": p.ndim == 2, "all but one": name == "v.weight"}[frozen]
            p.requires_grad_(kept)
    assert same(results(models[0]), results(models[1]))
    assert casts["multiply"] == 6


def test_second_derivatives_and_parts_of_gradients():
    values = []
    for emit in ("never", "always"):
        norm = block(emit).norm
        if emit == "always":
            vars(norm)["octavo_emitter"].note(("e4m3/row", "e4m3/row", None))
        x, g = data(torch.float32)
        norm.float()
        (dx,) = torch.autograd.grad(norm(x), x, g, create_graph=True)
        values.append((dx.detach(), *torch.autograd.grad(dx.square().sum(), (x, norm.weight))))
    assert same(*values)


def test_hooks(casts):
    """A hook that replaces the result: linears read the new one. A hook inside an MLP is called."""
    models = block("never"), block("always")
    for model in models:
        model.norm.register_forward_hook(lambda module, args, out: out * 2)
        model.mlp.act_fn.register_forward_hook(lambda module, args, out: out + 1)
        model.mlp.down_proj.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        model.post.register_full_backward_hook(lambda module, grads, outs: (grads[0] * 2,))
    assert same(results(models[0]), results(models[1]))
    assert casts["multiply"] == 0  # nobody reads what the two norms and the product return themselves


def test_an_in_place_write_is_noticed():
    models = block("never"), block("always")
    for model in models:
        model.norm.register_forward_hook(lambda module, args, out: out.mul_(2))
    assert same(results(models[0]), results(models[1]))


def test_one_norm_for_two_readers(casts):
    """A norm that is called twice in a forward."""
    models = block("never"), block("always")
    for model in models:
        model.post = model.norm
    assert same(results(models[0]), results(models[1]))
    assert casts["multiply"] >= 6


def test_a_norm_that_no_linear_reads_stops(casts):
    class Final(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = LlamaRMSNorm(K), nn.Linear(K, K, bias=False)

        def forward(self, x):
            return self.norm(self.linear(x))

    model = octavo.convert(Final().bfloat16(), emit="always", verbose=False)
    emitter = vars(model.norm)["octavo_emitter"]
    results(model, passes=TRIES + 1)
    assert casts["multiply"] == 0 and emitter.spec is None and not emitter.due()
    emitter.unread = AGAIN - 1
    assert emitter.due()


def test_changed_recipes_are_followed(casts):
    models = block("never"), block("always")
    for model in models:
        results(model)
        for name in ("q", "k", "v"):
            octavo.nn.change_recipe(model, name, "tensorwise", reason="test")
    assert same(results(models[0]), results(models[1]))
    for model in models:
        for name in ("q", "k", "v"):
            octavo.nn.change_recipe(model, name, "rowwise", reason="test")
    assert same(results(models[0], passes=TRIES + 2), results(models[1], passes=TRIES + 2))


def test_replaced_code_runs():
    class Norm(LlamaRMSNorm):
        def forward(self, hidden_states):
            input_dtype = hidden_states.dtype
            hidden_states = hidden_states.to(torch.float32)
            variance = hidden_states.pow(2).mean(-1, keepdim=True)
            hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
            return self.weight * hidden_states.to(input_dtype)

    model = block("never")
    octavo.revert(model)
    model.norm.__class__ = Norm
    model = octavo.convert(model, "rowwise", emit="always", verbose=False)
    results(model)
    Norm.forward = lambda self, x: x * 0 + self.weight
    x, _ = data()
    assert torch.equal(model.norm(x), (x * 0 + model.norm.weight))


def test_without_autograd_and_disabled(casts):
    models = block("never"), block("always")
    for model in models:
        results(model)
    before, (x, _) = casts["multiply"], data()
    with torch.no_grad():
        assert torch.equal(models[0](x), models[1](x))
    with octavo.disabled():
        assert torch.equal(models[0](x), models[1](x))
    assert casts["multiply"] == before


def test_auto_leaves_a_cpu_alone_and_never_is_never():
    for emit in ("auto", "never"):
        assert not any(map(emitting.emits, block(emit).modules()))
        assert type(block(emit).norm) is LlamaRMSNorm
    with pytest.raises(ValueError, match="emit is 'auto', 'always', 'never'; got 'allways'"):
        block("allways")


def test_auto_needs_a_device_and_a_size(monkeypatch, casts):
    monkeypatch.setattr(emitting, "_emits_here", lambda: True)
    model = block("auto")
    results(model)
    assert emitting.emits(model.norm) == "norm" and casts["multiply"] == 0  # the tensors are on a CPU


def test_stored_activations_come_first():
    model = block("always", activations="fp8")
    assert not any(map(emitting.emits, model.modules()))


def test_report_revert_and_converting_twice():
    model = Block().bfloat16()
    keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    octavo.convert(model, "rowwise", emit="always", verbose=False)
    assert list(model.state_dict()) == keys
    report = octavo.report(model)
    rows = {row.name: row for row in report.activations}
    assert rows.keys() == {"norm", "post", "mlp"} and all(row.emits for row in rows.values())
    assert "3 norms and gated MLPs emit the FP8 form of their result" in report.summary
    assert "emits fp8" in str(report) and rows["mlp"].activation_storage is None
    with pytest.raises(ValueError, match="converted already"):
        octavo.convert(model)
    octavo.revert(model)
    assert [type(m) for m in model.modules()] == classes and "octavo_emitter" not in vars(model.norm)
    octavo.convert(model, "rowwise", emit="always", verbose=False)
    assert emitting.emits(model.mlp) == "glu"


def test_copies_and_pickles(casts):
    model = block("always")
    expected = results(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert emitting.emits(other.norm) == "norm" and same(results(other), expected)


@pytest.mark.slow
def test_compiled():
    model = block("always")
    expected = results(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert same(results(model, lambda x: compiled(x)), expected)


def test_every_factor_function_is_that_of_a_known_forward():
    assert factors._NORMS.keys() == NORMS.keys()
    for name, make in NORMS.items():
        assert factors.factored(make()).factors is factors._NORMS[name]
    assert [factors.factored(make()).factors.__name__ for make in MLPS.values()] == [
        "_gate_times_up", "_up_times_joint_gate", "_gate_times_up"
    ]  # fmt: skip
    for module in (nn.RMSNorm(K), nn.LayerNorm(K), nn.Linear(K, K)):
        assert factors.factored(module) is None
