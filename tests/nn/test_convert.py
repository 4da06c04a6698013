import copy
import inspect
import operator
import pickle
import re
import sys
import typing
import warnings
from collections import Counter
from dataclasses import replace

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils.dataclasses import get_module_class_from_name
from models import MLP, gradients, llama
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

import octavo
from octavo.nn.convert import change_recipe
from octavo.nn.linear import Linear
from octavo.numerics.recipe import equalized
from support.moe_models import mixture
from support.refusals import refused
from tensors import same


@pytest.mark.parametrize("activations", ["bf16", "fp8"])
def test_everything_but_products_and_what_is_stored_is_kept(activations):
    model = llama(tie_word_embeddings=True).eval()
    block, kinds, seen = model.model.layers[1], [type(module) for module in model.modules()], []
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    hooked = [block.input_layernorm, block.self_attn, block.mlp.up_proj, block.mlp]
    for module in hooked[::-1]:
        module.register_forward_hook(lambda module, *_: seen.append(module))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = dict(model.named_parameters())
    before = copy.deepcopy(model.state_dict())
    octavo.convert(model, activations=activations, verbose=False)
    assert all(isinstance(module, kind) for module, kind in zip(model.modules(), kinds, strict=True))
    assert not any(module.training for module in model.modules())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.model.layers[0].mlp.up_proj.weight.requires_grad
    assert all(p is parameters[name] for name, p in model.named_parameters())
    model(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    assert seen == hooked
    assert same(before, dict(model.state_dict()))
    weight = model.model.layers[0].self_attn.q_proj.weight
    optimizer.step()
    assert not torch.equal(weight, before["model.layers.0.self_attn.q_proj.weight"])


def test_a_skip_pattern_that_matches_nothing_warns():
    with pytest.warns(UserWarning, match=r"'\*dwn_proj' matches no linear layer \(did you mean 'down_proj'"):
        octavo.convert(llama(), skip=["*dwn_proj"], verbose=False)


def test_conv1d_of_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_layer=1, n_embd=32, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
    plain = GPT2LMHeadModel(config).eval()
    model = octavo.convert(copy.deepcopy(plain), verbose=False)
    rows = octavo.report(model).rows
    assert sum(row.converted for row in rows) == 4 and rows[-1].reason.startswith("vocabulary head (tied")
    ids = torch.arange(16).reshape(1, 16)
    for m in (plain, model):
        m(ids, labels=ids).loss.backward()
    for (name, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
        if "c_attn" in name or "c_fc" in name:
            assert got.grad.shape == want.grad.shape and octavo.numerics.sqnr(want.grad, got.grad) > 15, name
    layer = model.transformer.h[0].attn.c_attn
    assert "recipe=rowwise" in repr(layer) and isinstance(layer, type(plain.transformer.h[0].attn.c_attn))
    octavo.revert(model)
    assert torch.equal(model(ids).logits, plain(ids).logits)


class Adapted(nn.Module):
    """A linear as PEFT adapts it, a router and a classifier."""

    def __init__(self, width: int = 1024, rank: int = 64):
        super().__init__()
        self.base_layer = nn.Linear(width, width, bias=False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(width, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, width, bias=False)})
        self.router, self.score = nn.Linear(width, 8), nn.Linear(width, 2)


@pytest.mark.parametrize("gpu", [None, "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "Unknown GPU"])
@pytest.mark.parametrize("recipe", [None, "rowwise"])
def test_narrow_layers_stay_as_they_are_on_every_machine(gpu, recipe, monkeypatch):
    monkeypatch.setattr("octavo.planner.auto_convert.local_gpu_name", lambda: gpu)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*predicted to gain")
        rows = {row.name: row for row in octavo.report(octavo.convert(Adapted(), recipe, verbose=False))}
    for name in ("lora_A.default", "lora_B.default", "router", "score"):
        assert not rows[name].converted and "do not gain from FP8 by themselves" in rows[name].reason, name
    assert rows["lora_A.default"].reason.startswith("adapter of low rank: 1024 → 64 features")
    assert rows["router"].reason.startswith("narrow: 1024 → 8 features")
    assert rows["base_layer"].converted or recipe is None


def test_a_narrow_model_and_a_wide_adapter_are_converted():
    small = octavo.convert(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 16)), verbose=False)
    assert [row.converted for row in octavo.report(small)] == [True, True]
    wide = octavo.convert(Adapted(256, rank=128), verbose=False)
    assert {row.name for row in octavo.report(wide) if row.converted} == {
        "base_layer", "lora_A.default", "lora_B.default",
    }  # fmt: skip


class Inherited(nn.Linear):
    """Adds to nn.Linear, and computes the same."""

    note = "mine"


class Written(nn.Linear):
    def forward(self, hidden):
        out = hidden @ self.weight.T
        if self.bias is not None:
            out = out + self.bias
        return out


class Scaled(nn.Linear):
    def forward(self, hidden):
        out = hidden @ self.weight.T
        if self.bias is None:
            return out * 2
        return out + self.bias


class Called(nn.Linear):
    def __call__(self, hidden):
        return super().__call__(hidden) + 1


@pytest.mark.parametrize("owner", [Inherited, Written, FalconLinear])
@pytest.mark.parametrize("bias", [True, False])
def test_a_subclass_that_computes_the_same_is_converted_and_keeps_its_class(owner, bias):
    torch.manual_seed(0)
    model, x = nn.Sequential(owner(64, 32, bias=bias)), torch.randn(5, 64)
    plain = nn.Sequential(nn.Linear(64, 32, bias=bias))
    plain.load_state_dict(model.state_dict())
    before = model(x)
    octavo.convert(model, verbose=False)
    octavo.convert(plain, verbose=False)
    assert isinstance(model[0], owner) and torch.equal(model(x), plain(x)) and not torch.equal(model(x), before)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    change_recipe(model, "0", None, reason="test")
    assert type(model[0]) is owner
    change_recipe(model, "0", "rowwise", reason="test")
    octavo.revert(model)
    assert type(model[0]) is owner and torch.equal(model(x), before)


@pytest.mark.parametrize("owner", [Scaled, Called, type(nn.MultiheadAttention(8, 2).out_proj)])
def test_a_subclass_that_computes_or_is_read_otherwise_is_left_alone(owner):
    model = nn.Sequential(owner(64, 64), nn.Linear(64, 64))
    assert [row.converted for row in octavo.report(octavo.convert(model, verbose=False))] == [False, True]


class OwnsList(nn.Module):
    def __init__(self, *linears):
        super().__init__()
        self.linears = nn.ModuleList(linears)

    def forward(self, x):
        return sum(linear(x) for linear in self.linears)


@pytest.mark.parametrize("flat", [lambda *linears: nn.Sequential(*linears), OwnsList], ids=["Sequential", "ModuleList"])
def test_the_work_is_linear_in_the_length_of_a_flat_list(flat):
    def calls(count):
        model, counted = flat(*(nn.Linear(16, 16) for _ in range(count))), Counter()
        sys.setprofile(lambda frame, event, argument: counted.update([event]))
        try:
            octavo.convert(model, activations="fp8", verbose=False)
        finally:
            sys.setprofile(None)
        return counted["call"]

    calls(2)  # imports
    assert calls(120) < 5 * calls(30)


class Seeing(ModelHook):
    def pre_forward(self, module, *args, **kwargs):
        module.seen = True
        return args, kwargs


def dispatched(model):
    for module in model.modules():
        if isinstance(module, nn.Linear):
            add_hook_to_module(module, Seeing())
    return model


def test_a_dispatched_model_says_how_and_one_dispatched_later_computes_in_fp8():
    with pytest.raises(ValueError, match="remove_hook_from_submodules.*octavo.convert.*dispatch_model"):
        octavo.convert(dispatched(nn.Sequential(nn.Linear(64, 64))), verbose=False)
    model, x = octavo.convert(nn.Sequential(nn.Linear(64, 64)), verbose=False), torch.randn(4, 64)
    before = model(x)
    assert torch.equal(dispatched(model)(x), before) and model[0].seen


@pytest.mark.parametrize(
    "call",
    [octavo.convert, octavo.revert, octavo.report, octavo.parallelize, lambda m: octavo.plan(m, 1, 8)],
    ids=["convert", "revert", "report", "parallelize", "plan"],
)
@pytest.mark.parametrize("model", [None, [nn.Linear(2, 2)], "model", nn.Linear], ids=["None", "list", "str", "class"])
def test_what_is_no_model_is_one_clear_error(call, model):
    refused(r"takes a torch.nn.Module.*got (a NoneType|a list|a str|the class Linear)", call, model, kind=TypeError)


def test_a_plan_can_be_stored_edited_and_carried_out():
    plan = octavo.Plan.from_json(octavo.convert(llama(), "blockwise", verbose=False).octavo_plan.to_json())
    decisions = dict(plan.decisions)
    decisions["model.layers.0.mlp.up_proj"] = octavo.numerics.Decision(recipe=None, reason="by hand")
    model = octavo.convert(llama(), plan=octavo.Plan(decisions), verbose=False)
    rows = {row.name: row for row in octavo.report(model).rows}
    assert rows["model.layers.0.mlp.up_proj"].reason == "by hand"
    assert rows["model.layers.0.mlp.gate_proj"].recipe == "blockwise"


def test_convert_says_what_it_did(capsys):
    model = octavo.convert(llama())
    said = capsys.readouterr().err
    assert said.startswith("octavo: converted 14 of 15 linear layers to rowwise (8")
    assert "; lm_head: vocabulary head" in said
    assert "emulated on cpu, without speed-up" in said
    assert [row.name for row in octavo.report(model) if not row.converted] == ["lm_head"]


def test_report_groups_like_layers_and_reads_any_model():
    model = llama()
    text = str(octavo.report(model))
    assert "octavo.convert was not called" in text
    text = str(octavo.report(octavo.convert(model, verbose=False)))
    assert "model.layers.{0-1}.self_attn.q_proj  rowwise" in text
    assert octavo.report(model.model.layers[0]).summary.startswith("converted 7 of 7")
    octavo.revert(model)
    octavo.convert(model, skip=["model.layers.0.mlp"], verbose=False)
    summary = octavo.report(model).summary
    assert "; 3 layers: skipped by pattern 'model.layers.0.mlp'; lm_head: vocabulary head" in summary
    assert re.search(r"^model\.layers\.1\.mlp\.up_proj +rowwise", str(octavo.report(model)), re.MULTILINE)


def snapshot(model):
    return [(type(m), dict(vars(m)).keys(), m.training) for m in model.modules()]


def integer_weights():
    model = llama()
    layer = model.model.layers[1].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    return model


def complex_weights():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.complex64))


def raising(module, fqn):
    if "layers.1" in fqn:
        raise KeyError("oops")
    return True


@pytest.mark.parametrize(
    ("make", "arguments", "error", "message"),
    [
        (llama, {"recipe": "rowise"}, ValueError, r"unknown recipe 'rowise' \(did you mean 'rowwise'\?\)"),
        (llama, {"recipe": 8}, TypeError, "recipe is a name or an octavo.Recipe; got int"),
        (llama, {"skip": "*.o_proj"}, TypeError, r"write skip=\['\*.o_proj'\]"),
        (llama, {"filter": raising}, ValueError, "filter raised KeyError on 'model.layers.1.self_attn.q_proj': 'oops'"),
        (llama, {"filter": lambda m, n: None}, TypeError, "returned None for 'model.layers.0.self_attn.q_proj'"),
        (llama, {"filter": lambda m, n: False}, ValueError, "no layer would be converted.*excluded by filter"),
        (integer_weights, {}, TypeError, "cannot convert model.layers.1.mlp.down_proj: its weight is torch.int8"),
        (complex_weights, {}, TypeError, "cannot convert 1: its weight is torch.complex64"),
        (lambda: octavo.convert(llama(), verbose=False), {}, ValueError, "converted already.*octavo.revert"),
        (lambda: nn.ReLU(), {}, ValueError, "it has no nn.Linear and no transformers"),
        (llama, {"plan": octavo.Plan({}), "recipe": "rowwise"}, ValueError, "pass plan alone"),
        (llama, {"precision": "fp8"}, TypeError, r"precision is an octavo.Precision; got 'fp8': make one with"),
        (llama, {"plan": "plan.json"}, TypeError, r"plan is an octavo.Plan; got 'plan.json': read one with"),
        (llama, {"precision": octavo.Precision(), "recipe": "rowwise"}, ValueError, "precision holds recipe"),
    ],
)
def test_bad_input_is_one_clear_error_and_leaves_the_model_untouched(make, arguments, error, message):
    model = make()
    before = snapshot(model)
    with pytest.raises(error, match=message):
        octavo.convert(model, **arguments)
    assert snapshot(model) == before


def test_a_plan_of_a_smaller_model_names_the_layers_it_lacks():
    small = octavo.nn.rule_plan(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    before = snapshot(model)
    refused(r"does not name 4 of .* layers \(\{2-5\}\).*partial=True", octavo.convert, model, plan=small)
    assert snapshot(model) == before
    partial = octavo.Plan.from_json(replace(small, partial=True).to_json())
    assert partial.partial and not octavo.Plan.from_json(small.to_json()).partial
    octavo.convert(model, plan=partial, verbose=False)
    assert [row.converted for row in octavo.report(model)] == [True, True] + [False] * 4
    assert model.octavo_plan == partial  # which applies again after octavo.revert


def test_a_plan_is_checked_as_a_whole_before_anything_is_done():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Scaled(8, 8))
    good = octavo.numerics.Decision(recipe=octavo.RECIPES["rowwise"], reason="by hand")
    for name, message in (("1", "ReLU is not a linear layer"), ("2", "behaviour of its own")):
        before = snapshot(model)
        refused(message, octavo.convert, model, plan=octavo.Plan({"0": good, name: good}))
        assert snapshot(model) == before
    plan = octavo.Plan.from_json('{"modules": [{"name": "0", "recipe": "mxfp8", "reason": "by name"}]}')
    assert plan["0"].recipe is octavo.RECIPES["mxfp8"]


def test_a_sharded_layer_is_known_by_its_class_and_not_by_a_name():
    from torch.distributed.fsdp import FSDPModule

    model = nn.Sequential(nn.Linear(128, 128), type("FSDPLinear", (nn.Linear,), {})(128, 128), nn.SiLU())
    model[0].__class__ = type("Sharded", (FSDPModule, nn.Linear), {})
    model[2].__class__ = type("Sharded", (FSDPModule, nn.SiLU), {})
    plan = octavo.nn.rule_plan(model, precision=octavo.Precision.level("fp8+activations"))
    assert [plan[fqn].recipe is None for fqn in "012"] == [True, False, True]
    for fqn in ("0", "2"):
        assert "sharded by fully_shard already: convert before sharding" in plan[fqn].reason


def test_revert_refuses_classes_made_after_conversion():
    model = octavo.convert(nn.Sequential(nn.Linear(8, 8)), verbose=False)
    torch.nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())
    refused("0 became a ParametrizedLinear after it was converted", octavo.revert, model)
    assert model(torch.randn(2, 8)).shape == (2, 8)


def test_report_follows_what_is_done_to_parts():
    model = octavo.convert(llama(), verbose=False)
    octavo.convert(model.lm_head, verbose=False)
    octavo.revert(model.model.layers[0].mlp.up_proj)
    rows = {row.name: row for row in octavo.report(model).rows}
    assert (rows["lm_head"].recipe, rows["lm_head"].reason) == ("rowwise", "converted")
    assert rows["model.layers.0.mlp.up_proj"].reason == "not in the plan, or reverted since"
    octavo.revert(model)
    refused("has no converted layer", octavo.revert, model.lm_head)


# --- a layer in another recipe: the model that converting it so at once would have made ---


LAYER = "model.layers.1.mlp.down_proj"


def trained(model):
    """The loss of a batch, and all gradients."""
    tokens = torch.arange(48).view(2, 24) % 97
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return gradients(model) | {"loss": loss.detach()}


def planned(model, layer, recipe):
    """The plan that `convert` would make of a model, with a layer otherwise."""
    plan = octavo.convert(copy.deepcopy(model), activations="fp8", verbose=False).octavo_plan
    decision = replace(plan[layer], recipe=octavo.RECIPES.get(recipe))
    return octavo.Plan({**plan.decisions, layer: decision}, "fp8")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layer", "recipe"),
    [
        (LAYER, "tensorwise"), (LAYER, None), ("model.layers.0.self_attn.q_proj", "blockwise"),
        ("model.layers.0.mlp.gate_proj", "rowwise_hp_wgrad"), ("model.layers.0.mlp.gate_proj", None),
    ],
)  # fmt: skip
def test_as_if_converted_so_at_once(recipe, layer):
    model = llama().bfloat16()
    reference = octavo.convert(copy.deepcopy(model), plan=planned(model, layer, recipe), verbose=False)
    octavo.convert(model, activations="fp8", verbose=False)
    before = trained(model)
    change_recipe(model, layer, recipe, reason="a test")
    actual = trained(model)
    assert same(trained(reference), actual)
    assert not all(torch.equal(actual[name], before[name]) for name in before)
    rows = {row.name: row for row in octavo.report(model)}
    assert (rows[layer].recipe, rows[layer].reason) == (recipe, "a test")


def test_there_and_back_is_as_before():
    model = octavo.convert(llama().bfloat16(), keep_weights=True, verbose=False)
    before = trained(model)
    for recipe in (None, "blockwise", "rowwise"):
        change_recipe(model, LAYER, recipe, reason="a test")
    assert same(before, trained(model))
    octavo.revert(model)
    assert not any(isinstance(module, Linear) for module in model.modules())


@pytest.mark.parametrize(
    ("name", "recipe", "message"),
    [
        ("model.layers.1.mlp.down_prj", None, "no module 'model.layers.1.mlp.down_prj' .did you mean"),
        ("model.norm", "rowwise", "is not a linear layer"),
        (LAYER, "rowise", "did you mean 'rowwise'"),
    ],
)
def test_mistakes_of_a_change_leave_the_model_as_it_was(name, recipe, message):
    model = octavo.convert(llama(), verbose=False)
    before = str(octavo.report(model))
    refused(message, change_recipe, model, name, recipe, reason="a test")
    assert str(octavo.report(model)) == before


# --- frameworks read the class names and signatures of modules: those of a converted module are the original's ---


class Named(nn.Linear):
    """A linear whose argument has another name."""

    scale: "Unwritten"  # noqa: F821  an annotation that nothing resolves

    def forward(self, hidden: torch.Tensor) -> "torch.Tensor":
        """Multiply."""
        return nn.functional.linear(hidden, self.weight, self.bias)


class Block(nn.Module):
    """Owns linears, and stores what its operations save."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), Named(128, 64)

    def forward(self, x: torch.Tensor, residual: typing.Optional["torch.Tensor"] = None, *, scale: float = 1.0):
        """Add the MLP."""
        y = self.down(self.act(self.up(self.norm(x)))) * scale
        return y if residual is None else y + residual


KINDS = {
    "linear": (nn.Linear, lambda: nn.Linear(64, 64), {}),
    "equalized linear": (nn.Linear, lambda: nn.Linear(64, 64), {"recipe": equalized("rowwise")}),
    "resident linear": (nn.Linear, lambda: nn.Linear(64, 64).requires_grad_(False), {"frozen": "fp8"}),
    "subclass of a linear": (Named, lambda: nn.Sequential(Named(64, 64)), {}),
    "Conv1D": (Conv1D, lambda: nn.Sequential(Conv1D(64, 64)), {}),
    "experts": (None, lambda: mixture("mixtral"), {}),
    "storing experts": (None, lambda: mixture("mixtral"), {"activations": "fp8"}),
    "storing norm, gated MLP and activation": (LlamaRMSNorm, llama, {"activations": "fp8"}),
    "storing block and root": (Block, Block, {"activations": "fp8"}),
    "storing blocks": (nn.LayerNorm, lambda: nn.Sequential(Block(), MLP(), Block()), {"activations": "fp8"}),
}


def described(module: nn.Module) -> dict[str, typing.Any]:
    """What frameworks read of a module."""
    owner, forward = type(module), type(module).forward
    names = operator.attrgetter("__name__", "__qualname__", "__module__", "__doc__")
    return {
        "names": names(owner), "names of forward": names(forward), "forward": inspect.unwrap(forward),
        "annotations": inspect.get_annotations(owner), "hints": typing.get_type_hints(forward),
        "signature": inspect.signature(forward), "bound": inspect.signature(module.forward),
        "source": inspect.getsource(forward), "repr": module._get_name(),
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_module_is_described_as_before(kind):
    owner, make, arguments = KINDS[kind]
    model = make()
    before = [(described(module), type(module)) for module in model.modules()]
    octavo.convert(model, verbose=False, **arguments)
    changed = [module for module, (_, plain) in zip(model.modules(), before, strict=True) if type(module) is not plain]
    assert changed and (owner is None or any(isinstance(module, owner) for module in changed))
    for again in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for module, twin, (facts, plain) in zip(again.modules(), model.modules(), before, strict=True):
            assert described(module) == facts and isinstance(module, plain) and type(module) is type(twin)
            assert get_module_class_from_name(again, plain.__name__).__name__ == plain.__name__


def test_an_argument_passes_by_the_name_that_the_signature_shows():
    x = torch.randn(16, 64)
    model = octavo.convert(nn.Sequential(Named(64, 64)), verbose=False)
    assert torch.equal(model[0](hidden=x), model[0](x))
    with pytest.raises(TypeError, match="positional arguments"):
        model[0](x, hidden=x)
    with pytest.raises(TypeError, match=r"Named.forward\(\) has no argument 'input'; it has \['hidden'\]"):
        model[0](input=x)
