"""`run.compile`: losses, graphs and notes of runs whose blocks compile, against eager ones.

Most tests have the backend "eager", which calls what Dynamo traces: graphs, guards and breaks are the real ones. What
AOTAutograd does to stored activations needs "aot_eager".
"""

import logging
import re
from contextlib import nullcontext
from copy import deepcopy
from importlib import import_module
from itertools import product

import pytest
import tiny_runs
import torch
from test_faults import AUTOPILOT_ON, models_with, outlier
from tiny_runs import LLAMA, make_trainer, recorded, rejected, slow
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import octavo
from live_tensors import bytes_left_by
from octavo.nn.equalized import compiled_pass, equalizer_of
from octavo.nn.memory_audit import saved_for_backward
from octavo.numerics import sqnr
from octavo.runtime.switch import SWITCH
from octavo.runtime.torch_compat import run_eagerly
from octavo.train import ConfigError, compiled_blocks, run
from octavo.train.compiled_blocks import Checkpointing, CompiledBlocks, find_blocks
from support.dispatch_modes import Passing

MODES = ("none", "full", "selective")
STORED = {"level": "fp8+activations"}
MIXTRAL = {"type": "mixtral", "config": LLAMA | {"num_local_experts": 2, "num_experts_per_tok": 1}}


@pytest.fixture(autouse=True)
def traced_only(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(compiled_blocks, "BACKEND", "eager")
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)  # pytest keeps every graph as text


@pytest.fixture
def aot(monkeypatch, traced_only):
    monkeypatch.setattr(compiled_blocks, "BACKEND", "aot_eager")


@pytest.fixture
def both(make_config, tmp_path):
    """Runs a configuration eagerly and compiled. Returns the losses of both, and what the compiled run tells."""

    def runs(**sections):
        settings = {"steps": 3} | sections.pop("run", {})
        modes = [settings | {"compile": mode} for mode in ("none", "blocks")]
        both = [recorded(make_config(**sections, run=mode), tmp_path / mode["compile"]) for mode in modes]
        return *([row.loss for row in recorder.rows] for recorder in both), both[1]

    return runs


def compiled(recorder):
    notes = " ".join(note for note in recorder.notes if "graphs of blocks" in note)
    return [int(number) for number in re.findall(r"graphs of blocks compiled: (\d+)", notes)]


@pytest.mark.thorough
@pytest.mark.parametrize("checkpointing", ["none", *map(slow, MODES[1:])])
def test_equal_blocks_are_one_graph_with_stored_activations(both, aot, checkpointing):
    eager, losses, recorder = both(precision=STORED | {"checkpointing": checkpointing})
    assert losses == pytest.approx(eager, abs=2e-3) and compiled(recorder) == [1]
    assert "3 blocks compile, each one graph without a break" in recorder.notes
    assert recorder.result.startup["compile"]["wall"] > 0 and "compile " in " ".join(recorder.notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "graphs"),
    [
        ({"optim": {"micro_batches": 2, "ema": 0.9}}, 1),
        ({"precision": {"level": "fp8"}, "data": {"packing": "documents"}}, 1),
        ({"precision": {"level": "fp8", "parameters": "fp32"}}, 1),
        ({"precision": {"level": "fp8"}, "lora": {"rank": 4}}, 2),  # the first block's input has no gradient
        ({"precision": {"level": "fp8", "recipe": "blockwise", "skip_last": 1}}, 2),
    ],
    ids=["micro-batches", "packed", "autocast", "lora", "a block in bf16"],
)
def test_losses_are_those_of_eager_runs(both, sections, graphs):
    eager, losses, recorder = both(**sections)
    assert losses == eager and compiled(recorder) == [graphs]


@pytest.mark.thorough
def test_evaluation_has_graphs_and_samples_have_none(both):
    sample = {"prompts": ["the"], "tokens": 4, "every": 1}
    sections = {"precision": {"level": "fp8"}, "eval": {"every": 1}, "sample": sample, "inspect": {"every": 2}}
    eager, losses, recorder = both(**sections)
    assert losses == eager
    assert compiled(recorder) == [1, 2]  # with gradients; without them, and in high precision
    assert len(recorder.rows[-1].samples) == 1


@pytest.mark.thorough
def test_a_moved_layer_compiles_its_block_again(make_config, tmp_path):
    tables = AUTOPILOT_ON | {"run": {"steps": 4, "compile": "blocks"}}
    with models_with(outlier):
        assert len(compiled(recorded(make_config(**tables), tmp_path))) == 2


def test_a_graph_break_of_the_conversion_is_an_error(make_config, tmp_path, monkeypatch):
    module = import_module("octavo.nn.linear")
    function = module.linear

    def broken(*args):
        if not SWITCH.off:
            torch._dynamo.graph_break()
        return function(*args)

    monkeypatch.setattr(module, "linear", broken)
    config = make_config(precision={"level": "fp8"}, run={"compile": "blocks"})
    with pytest.raises(ConfigError, match=r'LlamaDecoderLayer compiles unconverted.*test_compiled_blocks.py:.*"none"'):
        run(config, out=tmp_path / "run")


@pytest.mark.thorough
def test_blocks_that_do_not_compile_unconverted_run_eagerly(both):
    config = MIXTRAL["config"] | {"output_router_logits": True}
    eager, losses, recorder = both(precision={"level": "fp8"}, model=MIXTRAL | {"config": config})
    assert losses == eager
    note = "blocks run eagerly, not compiled: MixtralDecoderLayer does not compile, unconverted either: "
    assert recorder.result.compiled.startswith(note) and "output_capturing.py" in recorder.result.compiled
    assert [note for note in recorder.notes if "eagerly" in note] == [recorder.result.compiled]


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        *(({"parallel": {name: 2}}, "between ranks") for name in ("tp", "cp")),
        ({"precision": {"level": "fp8"}, "parallel": {"ep": 2}}, "between ranks"),
        ({"parallel": {"pp": 2, "schedule": "ZBVZeroBubble", "reshard_after_forward": False}}, "in two parts"),
        ({"precision": {"level": "fp8", "recipe": "rowwise_equalized"}, "parallel": {"fp8_comm": "on"}}, "gathered"),
        ({"precision": {"level": "fp8", "recipe": "rowwise_equalized"}, "parallel": {"pp": 2}}, "of a pipeline"),
    ],
)
def test_runs_that_cannot_compile_are_refused(make_config, sections, reason):
    assert reason in make_config(**sections, run={"compile": "auto"}).uncompilable
    with pytest.raises(ConfigError, match=f'run.compile = "blocks": .*{reason}.*set run.compile = "none"'):
        make_config(**sections, run={"compile": "blocks"})


def test_auto_compiles_on_a_gpu():
    model = nn.ModuleList([nn.Linear(2, 2)])
    assert not CompiledBlocks(model, "auto", torch.device("cpu")).active
    assert CompiledBlocks(model, "auto", torch.device("cuda")).active
    assert CompiledBlocks(model, "auto", torch.device("cuda"), "why").note().endswith("not compiled: why")
    with pytest.raises(ConfigError, match="Linear has no list of equal blocks"):
        CompiledBlocks(nn.Linear(2, 2), "blocks", torch.device("cpu"))


class Breaks(nn.Module):
    def forward(self, x):
        torch._dynamo.graph_break()
        return x + 1


def test_auto_runs_eagerly_what_does_not_compile():
    model = nn.ModuleList([Breaks(), Breaks()])
    blocks = CompiledBlocks(model, "auto", torch.device("cuda"))
    blocks.compile()
    assert model[1](model[0](torch.ones(2))).tolist() == [3.0, 3.0]
    assert re.search(r"eagerly, not compiled: Breaks does not compile: .*test_compiled_blocks.py:", blocks.note())


def test_passes_of_a_frozen_layer_do_not_end_in_compiled_steps_either():
    torch.manual_seed(0)
    gradients, passes = [], []
    for compiles in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        octavo.convert(model, "rowwise_equalized", verbose=False)[0].requires_grad_(False)
        if compiles:
            model.compile(fullgraph=True, backend="eager")
        for step in range(9):
            model.zero_grad()
            with compiled_pass(model) if compiles else nullcontext():
                x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
                model(x * (1 + 9 * x[:1].abs())).square().sum().backward()
            gradients.append(model[1].weight.grad.clone())
        passes.append([equalizer_of(layer).passes for layer in model])
    assert all(map(torch.equal, gradients[:9], gradients[9:])) and passes == [[0, 8], [0, 8]]


@pytest.mark.thorough
def test_experts_that_do_not_store_have_a_graph_of_their_own():
    """They come first, so that their graph would serve the others if nothing guarded it."""
    torch.manual_seed(0)
    config = MixtralConfig(**MIXTRAL["config"], vocab_size=64)
    model = octavo.convert(MixtralForCausalLM(config), activations="fp8", verbose=False)
    del vars(model.model.layers[0].mlp.experts)["octavo_storage"]
    blocks = CompiledBlocks(model, "blocks", torch.device("cpu"))
    before = blocks.graphs
    blocks.compile()
    ids = torch.arange(48).view(3, 16)
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert blocks.graphs - before == 2


def test_a_step_without_a_graph_is_an_error():
    blocks = CompiledBlocks(nn.ModuleList([nn.Linear(2, 2)]), "blocks", torch.device("cpu"))
    blocks.compile()
    with run_eagerly():
        blocks._blocks[0](torch.ones(1, 2))
    rejected("no block was compiled", blocks.check)
    blocks._blocks[0](torch.ones(1, 2))
    blocks.check()


SIZES = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 128,
}  # fmt: skip
GPT2 = {"n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 512}
FAMILIES = {
    "llama": {}, "qwen3": {"head_dim": 64}, "gemma3_text": {"head_dim": 64},
    "gpt2": GPT2 | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
}  # fmt: skip


def gradients_and_saved_bytes(model, context=nullcontext):
    ids = torch.arange(512).mul(7).remainder(512).view(4, 128)
    with context(), saved_for_backward(model) as saved:
        model(ids, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, saved.bytes


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_families_save_what_eager_ones_do(family, aot):
    torch.manual_seed(0)
    fields = FAMILIES[family] if family == "gpt2" else SIZES | FAMILIES[family]
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
    eager = octavo.convert(deepcopy(plain), "rowwise", activations="fp8", verbose=False)
    compiled = deepcopy(eager)
    blocks = CompiledBlocks(compiled, "blocks", torch.device("cpu"))
    blocks.compile()
    gradients, saved = gradients_and_saved_bytes(compiled, blocks.one_pass)
    (expected, eager_bytes), (truth, _) = map(gradients_and_saved_bytes, (eager, plain))
    assert blocks.graphs == 1 and not blocks.reason and saved <= 1.05 * eager_bytes
    assert min(sqnr(t, gradients[n]) - sqnr(t, expected[n]) for n, t in truth.items()) > -1


# --- activation checkpointing ---


def checkpointed(make_config, mode, **precision):
    model = precision.pop("model", {"type": "llama", "config": LLAMA})
    config = make_config(model=model, precision={"checkpointing": mode} | precision)
    return make_trainer(config)


def gradients_of(trainer):
    trainer.model.zero_grad()
    torch.manual_seed(0)
    trainer.loss(*trainer._batch(0)).backward()
    return {name: param.grad for name, param in trainer.model.named_parameters() if param.grad is not None}


PRECISIONS = [{}, {"parameters": "fp32"}, {"level": "fp8"}, {"level": "fp8", "recipe": "rowwise_hp_wgrad"}]
PRECISIONS += [{"model": tiny_runs.GPT2}]  # dropout: the recomputation has to draw the same


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_gradients_are_bitwise_those_without(mode, precision, make_config):
    plain = gradients_of(checkpointed(make_config, "none", **precision))
    recomputed = gradients_of(checkpointed(make_config, mode, **precision))
    assert plain.keys() == recomputed.keys()
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


@pytest.mark.parametrize("level", ["bf16", "fp8"])
def test_less_is_kept(level, make_config):
    kept = {mode: checkpointed(make_config, mode, level=level)._saved_bytes_per_token() for mode in MODES}
    # The head's logits and their softmax are kept in every mode.
    head = 300 * 4
    assert kept["full"] - head < 0.25 * (kept["none"] - head)
    assert kept["full"] < kept["selective"] < kept["none"]


@pytest.mark.parametrize("level", ["bf16", "fp8+activations+optimizer"])
def test_a_description_leaves_nothing_alive(level, make_config):
    for mode in MODES:
        trainer = checkpointed(make_config, mode, level=level)
        trainer.describe()  # caches
        assert bytes_left_by(trainer.describe) == 0, mode


def test_selective_recomputes_no_matrix_product(make_config):
    products, counts = (torch.ops.aten.mm.default, torch.ops.octavo.scaled_mm.default), {}
    for level, mode in product(("bf16", "fp8"), MODES):
        trainer = checkpointed(make_config, mode, level=level)
        with Passing() as passing:
            gradients_of(trainer)
        counts[mode] = sum(map(passing.seen.count, products))
        assert mode != "selective" or counts["full"] > counts["none"] == counts["selective"] > 0


def test_modules_and_state_dict_stay_as_they_are(make_config):
    plain, wrapped = (checkpointed(make_config, mode).model for mode in ("none", "full"))
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in wrapped.named_modules()]
    assert plain.state_dict().keys() == wrapped.state_dict().keys()


def test_find_blocks():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.few = nn.ModuleList(nn.ReLU() for _ in range(2))
            self.mixed = nn.ModuleList([nn.ReLU(), nn.GELU(), nn.ReLU(), nn.GELU()])
            self.blocks = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))

    model = Model()
    assert find_blocks(model) == list(model.blocks)
    rejected("Linear has no list of equal blocks", lambda: Checkpointing(nn.Linear(1, 1), "full"))
