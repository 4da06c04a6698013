"""Packed documents: rows, losses of documents as on their own, and models that would mix them."""

import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import LLAMA, load, make_trainer, recorded, rejected, slow
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, masking_utils

import octavo
from octavo.nn.causal import IGNORE
from octavo.planner.fake import fake_tensors
from octavo.planner.trace import trace
from octavo.runtime.torch_compat import TorchDispatchMode
from octavo.train import ConfigError, compiled_blocks, packed_attention
from octavo.train.data.corpus import PackedRows, best_fit
from octavo.train.model import MASKED, auto_attention, build_model
from octavo.train.packed_attention import NAME, document_offsets, documents, is_varlen
from octavo.train.probe import check_causal
from octavo.train.run_plan import plan_configured, plan_memory
from octavo.train.tasks.language import _named

PACKED = {"packing": "documents", "sequence_length": 48}


@given(sizes=st.lists(st.integers(1, 20), max_size=60))
def test_best_fit(sizes):
    row = best_fit(np.array(sizes, np.int64), 20)
    assert all(np.sum(np.array(sizes)[row == number]) <= 20 for number in set(row.tolist()))
    assert sorted(set(row.tolist())) == list(range(len(set(row.tolist()))))
    firsts = [row.tolist().index(number) for number in range(len(set(row.tolist())))]
    assert firsts == sorted(firsts)
    if sizes:
        assert len(firsts) <= 1.5 * max(1, sum(sizes) / 20) + 1  # best fit decreasing: 11/9 of the optimum and 6/9


@given(lengths=st.lists(st.integers(2, 50), min_size=1, max_size=30))
def test_rows_hold_each_target_of_each_document_once(lengths):
    ends = np.cumsum(lengths)
    ids = np.arange(ends[-1], dtype=np.uint32)
    rows = PackedRows(ids, ends - lengths, ends, 12, fill=999)
    pairs = []
    for index in range(len(rows)):
        inputs, targets = rows.row(index)
        for (token, position), target, before in zip(
            inputs.tolist(), targets.tolist(), [None, *inputs.tolist()[:-1]], strict=True
        ):
            if target == IGNORE:
                assert token == 999
                continue
            pairs.append((token, target))
            continues = before is not None and before[0] == token - 1 and position == before[1] + 1
            assert position == 0 or continues
    firsts = set((ends - lengths).tolist())
    expected = [(number - 1, number) for number in range(ends[-1]) if number not in firsts]
    assert sorted(pairs) == expected


MODELS = {
    "llama": ("llama", LLAMA), "qwen3": ("qwen3", {**LLAMA, "head_dim": 16}),
    "gemma2": ("gemma2", {**LLAMA, "head_dim": 16, "sliding_window": 8}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}),
    "phi3": ("phi3", {**LLAMA, "pad_token_id": None}), "mixtral": ("mixtral", {**LLAMA, "num_local_experts": 4}),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "attention"),
    [
        *((model, "sdpa") for model in MODELS if model != "gemma2"),
        *(slow(model, "eager", unless=model in ("llama", "gemma2")) for model in MODELS),
    ],
)
def test_losses_of_documents_are_those_on_their_own(model, attention, make_config, lines):
    kind, fields = MODELS[model]
    model, precision = {"type": kind, "config": fields}, {"parameters": "fp32"}
    trainer = make_trainer(make_config(model=model, data=PACKED | lines, precision=precision))
    data = trainer.task.data
    trainer.model.set_attn_implementation(attention)
    trainer.check_causal()
    net = trainer.model.eval()
    inputs, targets = data.batch(0, 0, 8)
    alone = []
    with torch.no_grad():
        packed = net(**_named(inputs), use_cache=False).logits
        assert packed.dtype == torch.float32
        losses = F.cross_entropy(packed.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
        for row in range(8):
            starts = [*torch.nonzero(inputs[row, :, 1] == 0).flatten().tolist(), inputs.shape[1]]
            for start, stop in pairwise(starts):
                if (targets[row, start:stop] == IGNORE).all():
                    continue
                logits = net(input_ids=inputs[row : row + 1, start:stop, 0], use_cache=False).logits[0]
                expected = F.cross_entropy(logits, targets[row, start:stop])
                alone.append(float(expected))
                assert float(losses[row, start:stop].mean()) == pytest.approx(alone[-1], abs=1e-5)
    assert len(alone) > 10
    # The loss of the batch is the mean over its targets, by the trainer's own chunked loss too.
    with torch.no_grad():
        mean = trainer.task.loss(net, inputs, targets)
    assert float(mean) == pytest.approx(float(losses.sum() / (targets != IGNORE).sum()), abs=1e-5)


MIXING = {
    "mamba": ({"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, "takes no position_ids"),
    "bloom": ({"hidden_size": 32, "n_layer": 2, "n_head": 2}, "takes no position_ids"),
    "jamba": (
        {**LLAMA, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_experts": 2,
         "use_mamba_kernels": False, "mamba_d_state": 4},
        "depend on the document packed before it",
    ),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("kind", MIXING)
def test_models_that_mix_documents(kind, make_config, lines):
    fields, message = MIXING[kind]
    trainer = make_trainer(make_config(model={"type": kind, "config": fields}, data=PACKED | lines))
    rejected(message, trainer.check_causal)


def test_the_probe_finds_a_model_that_ignores_positions(make_config, lines):
    data = load(make_config(data=PACKED | lines))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, **LLAMA))
    inputs, _ = data.batch(0, 0, 1)
    check_causal(model, lambda rows: model(**_named(rows), use_cache=False).logits, inputs)
    with pytest.raises(ConfigError, match="depend on the document packed before it"):
        check_causal(model, lambda rows: model(input_ids=rows[..., 0], use_cache=False).logits, inputs)


@pytest.mark.thorough
def test_gradients_are_of_the_mean_over_all_targets(make_config, lines):
    """For micro-batches with other numbers of targets, beside a plain loop in fp32."""
    precision, optim = {"parameters": "fp32", "loss": "whole"}, {"batch": 8, "micro_batches": 4}
    trainer = make_trainer(make_config(data=PACKED | lines, precision=precision, optim=optim))
    trainer._autocast = nullcontext  # all of it in fp32
    inputs, targets = trainer.task.data.batch(3, 0, 8)
    targets[:2] = IGNORE  # of the first micro-batch none counts
    targets[2, 3:] = IGNORE
    loss = trainer.forward_backward(inputs, targets)
    model = AutoModelForCausalLM.from_config(trainer.model.config)
    model.load_state_dict(trainer.model.state_dict())
    logits = model(**_named(inputs), use_cache=False).logits
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), abs=1e-5)
    gradients = trainer.optimizer.gradients()
    for name, parameter in model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)
    assert len(gradients) > 10


# --- attention of variable length ---


GROUPED = LLAMA | {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
VARLEN_MODELS = {
    "llama": GROUPED | {"num_key_value_heads": 4},
    "qwen3": GROUPED | {"head_dim": 16},
    "gemma3_text": GROUPED
    | {"head_dim": 16, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"],
       "query_pre_attn_scalar": 24, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
    "mistral": GROUPED | {"sliding_window": 4, "head_dim": 12},
    "qwen2_moe": GROUPED
    | {"sliding_window": 4, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"],
       "mlp_only_layers": [0, 1]},
    "deepseek_v3": GROUPED
    | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
       "v_head_dim": 12, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1},
}  # fmt: skip
"""Plain and grouped heads; windows, a scale of their own, windows that only the mask has; heads that are padded; values
narrower than keys."""
LENGTHS = (9, 1, 6, 4), (1, 13, 4, 1, 1)


def positions():
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])


def make_model(kind, fields, attention="sdpa"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields), attn_implementation=attention)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            parameter.data *= 10  # scores that matter
    return model


def step(model, packed=None):
    """The logits, and the gradient of each parameter."""
    own = positions()
    ids = torch.randint(1, 64, own.shape, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    with documents(document_offsets(own, 9)) if packed is None else packed:
        out = model(input_ids=ids, position_ids=own, labels=ids, use_cache=False)
    out.loss.backward()
    return out.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def differences(model):
    """The largest relative differences of logits and gradients from those by masks."""
    model.set_attn_implementation("sdpa")
    logits, expected = step(model, torch.enable_grad())
    packed_attention.register()
    model.set_attn_implementation(NAME)
    actual, gradients = step(model)
    yield float((actual - logits).abs().max() / logits.abs().max())
    for name, gradient in expected.items():
        yield float((gradients[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-12))


@pytest.mark.parametrize("kind", VARLEN_MODELS)
def test_logits_and_gradients_are_those_by_masks(kind):
    assert max(differences(make_model(kind, VARLEN_MODELS[kind]).double())) < 1e-12


def test_offsets():
    own = positions()
    starts = [0, 9, 10, 16, 20, 21, 34, 38, 39]
    assert document_offsets(own, 9).tolist() == [*starts, *[40] * 24]
    assert document_offsets(own[:, :9], 1).tolist()[:2] == [0, 9]
    many = torch.zeros(2, 40, dtype=torch.int64)
    assert document_offsets(many, 80).tolist() == [*range(81)]
    with pytest.raises(RuntimeError, match="more than 32 documents"):
        document_offsets(many, 30)
    with pytest.raises(RuntimeError, match="a row begins inside one"):
        document_offsets(own + torch.tensor([[0], [1]]), 9)
    with fake_tensors() as mode:  # which raise where the host would wait for a number
        assert document_offsets(mode.from_tensor(own), 9).shape == (33,)


def test_autocast_casts_the_inputs_and_nothing_inside():
    packed_attention.register()
    q, k, v = torch.randn(3, 1, 2, 20, 8, generator=torch.Generator().manual_seed(0)).unbind()
    module, offsets = torch.nn.Module(), document_offsets(positions()[:1], 4)
    with torch.autocast("cpu", torch.bfloat16):
        actual, _ = packed_attention.attention(module, q, k, v.bfloat16(), offsets)
    expected, _ = packed_attention.attention(module, *(t.bfloat16() for t in (q, k, v)), offsets)
    assert actual.dtype == torch.bfloat16 and torch.equal(actual, expected)


def test_documents_in_rows_of_a_batch(make_config, lines):
    data = load(make_config(data=PACKED | lines))
    counts = torch.stack([(data.batch(0, number, 8)[0][..., 1] == 0).sum(1) for number in range(6)])
    for rows in (1, 2, 8):
        assert data.most_documents[rows] == counts.topk(rows).values.sum(1).max()


REFUSED = {
    "gpt2": ({"n_embd": 32, "n_layer": 1, "n_head": 2}, "GPT2Attention has dropout of 0.1"),
    "gemma2": (GROUPED | {"head_dim": 16}, "Gemma2Attention has a soft cap of 50.0"),
    "gpt_oss": (GROUPED | {"head_dim": 16, "num_local_experts": 2}, "GptOssAttention has sinks"),
    "llama4_text": (GROUPED | {"num_local_experts": 1, "intermediate_size_mlp": 32}, "model masks by chunked_overlay"),
    "bloom": ({"hidden_size": 32, "n_layer": 1, "n_head": 2}, "BloomForCausalLM compute"),
    "llama": (GROUPED | {"head_dim": 320}, "heads of 320, above 256"),
    "doge": (GROUPED | {"head_dim": 16}, "DogeForCausalLM does not run with it .too many indices"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_it_does_not_compute(kind, make_config, lines):
    fields, message = REFUSED[kind]
    fields = {name: value for name, value in fields.items() if name != "vocab_size"}
    config = make_config(model={"type": kind, "config": fields, "attention": "varlen"}, data=PACKED | lines)
    tokenizer = load(config).tokenizer
    rejected(message, build_model, config, tokenizer)
    config = make_config(model={"type": kind, "config": fields}, data=PACKED | lines)
    model = build_model(config, tokenizer)
    own = model.config._attn_implementation
    auto_attention(model, config, "cuda")
    assert model.config._attn_implementation == own != NAME
    assert (model in MASKED) == (own == "sdpa") and (own != "sdpa" or re.search(message, MASKED[model]))


def test_auto_and_mistakes(make_config, lines):
    for case in ("documents on cuda", "none on cuda", "documents on cpu", "stream on cuda"):
        packing, device = case.split(" on ")
        config = make_config(data=PACKED | lines | {"packing": packing})
        model = build_model(config, load(config).tokenizer)
        auto_attention(model, config, device)
        assert is_varlen(model) == (device == "cuda" and packing != "stream")
    model, ids = make_model("llama", GROUPED), torch.ones(1, 8, dtype=torch.int64)
    packed_attention.register()
    model.set_attn_implementation(NAME)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    padded = model(input_ids=ids, attention_mask=mask).logits  # without documents: masks of every kind
    model.set_attn_implementation("sdpa")
    assert torch.equal(padded, model(input_ids=ids, attention_mask=mask).logits)
    model.set_attn_implementation(NAME)
    with documents(document_offsets(torch.arange(8)[None], 1)), pytest.raises(ValueError, match="a mask of padding"):
        model(input_ids=ids, attention_mask=mask)


def test_a_thread_has_its_own_documents():
    """Two threads in the middle of their forwards, of which the one that began first ends first."""
    packed_attention.register()
    find = masking_utils.find_packed_sequence_indices
    model, both = make_model("llama", GROUPED).eval(), threading.Barrier(2, timeout=60)
    own, whole = positions(), torch.arange(20).expand(2, 20).contiguous()

    def logits(positions):
        return model(input_ids=torch.ones_like(positions), position_ids=positions, use_cache=False).logits

    expected = {"packed": logits(own), "whole": logits(whole)}
    model.set_attn_implementation(NAME)

    def packed():
        with documents(document_offsets(own, 9)):
            both.wait()
            actual = logits(own)
            both.wait()
        both.wait()
        return actual

    def without():
        both.wait()
        with documents(document_offsets(whole, 2)):
            inside = logits(whole)
            both.wait()
            both.wait()
        return inside, logits(own)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(packed), pool.submit(without)
        actual, (inside, outside) = first.result(), second.result()
    torch.testing.assert_close(actual, expected["packed"])
    torch.testing.assert_close(inside, expected["whole"])
    torch.testing.assert_close(outside, expected["packed"])
    assert masking_utils.find_packed_sequence_indices is find


@pytest.fixture
def losses(make_config, lines, tmp_path):
    """Losses of a run, trained and held out, and what it tells."""

    def losses(attention="varlen", **sections):
        model = {"type": "qwen3", "config": LLAMA | {"head_dim": 16}, "attention": attention}
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        own = {"precision": {"parameters": "fp32"}, "optim": {"micro_batches": 2, "lr": 1e-3}, "run": {"steps": 4}}
        data = {"data": PACKED | lines, "eval": {"every": 2, "fraction": 0.3}}
        seen = recorded(make_config(model=model, **own | data | sections), out)
        return [*(row.loss for row in seen.rows), *seen.result.held_out.values()], " ".join(seen.notes)

    return losses


SELECTIVE = {"parameters": "fp32", "checkpointing": "selective"}


@pytest.mark.thorough
def test_runs(losses):
    sample = {"every": 2, "prompts": ["a", "the cat"], "tokens": 3}
    expected, notes = losses("sdpa", sample=sample)
    assert "document by document" not in notes
    actual, notes = losses(sample=sample)
    assert actual == pytest.approx(expected, rel=1e-3) and "document by document" in notes  # autocast to bf16
    forwards = []
    for checkpointing in ("full", "selective"):
        with Recording() as recorded:
            assert losses(precision=SELECTIVE | {"checkpointing": checkpointing})[0] == actual
        forwards.append(len(recorded.forward))
    assert forwards[0] - forwards[1] == len(recorded.backward)  # "selective" does not compute attention again
    adapters = losses(lora={"rank": 2})[0]
    assert adapters == pytest.approx(losses("sdpa", lora={"rank": 2})[0], rel=1e-3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("backend", ["eager", slow("aot_eager"), slow("inductor")])
@pytest.mark.thorough
def test_compiled_blocks(losses, monkeypatch, backend):
    torch._dynamo.reset()
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)  # pytest keeps every graph as text
    monkeypatch.setattr(compiled_blocks, "BACKEND", backend)
    expected = losses(precision=SELECTIVE)[0]
    actual, notes = losses(precision=SELECTIVE, run={"steps": 4, "compile": "blocks"})
    # Inductor does not round to bf16 between the operations that it fuses.
    assert actual == (pytest.approx(expected, rel=3e-3) if backend == "inductor" else expected)
    assert "3 blocks compile, each one graph without a break" in notes
    assert notes.count("graphs of blocks compiled") == 2  # for training, and for evaluation
    if backend == "aot_eager":
        stored = {"level": "fp8+activations"}
        expected = losses(precision=stored)[0]
        actual = losses(precision=stored, run={"steps": 4, "compile": "blocks"})[0]
        assert actual[:4] == pytest.approx(expected[:4], abs=2e-3)  # after that few targets are held out


class Recording(TorchDispatchMode):
    """The tensors of attention: what the forward had and made, and what the backward got."""

    def __init__(self):
        super().__init__()
        self.forward, self.backward = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name == "torch_attn::_varlen_attn":
            self.forward.append([t.clone() for t in (*args[:3], *out[:2])])
        if func._schema.name == "torch_attn::_varlen_attn_backward":
            self.backward.append([t.clone() for t in args[1:6]])
        return out


def test_stored_activations_are_exact_in_attention():
    packed_attention.register()
    model = make_model("qwen3", GROUPED | {"hidden_size": 64, "head_dim": 16}, NAME).bfloat16()
    octavo.convert(model, precision=octavo.Precision.level("fp8+activations"), verbose=False)
    with Recording() as recorded:
        step(model)
    assert len(recorded.forward) == len(recorded.backward) == 2
    for before, after in zip(recorded.forward, reversed(recorded.backward), strict=True):
        assert all(map(torch.equal, before, after))


@pytest.mark.thorough
def test_plans(make_config, lines):
    length, rows = 1024, 2

    def config(attention, packing="documents"):
        fields = LLAMA | {"hidden_size": 128, "max_position_embeddings": length}
        data = PACKED | lines | {"sequence_length": length, "packing": packing}
        model = {"type": "llama", "config": fields, "attention": attention}
        return make_config(model=model, data=data, optim={"batch": rows})

    masks = 3 * rows * length**2 * 2  # one for each layer, in 16 bits
    sdpa, varlen, auto, flash = (plan_memory(config(name)) for name in ("sdpa", "varlen", "auto", "flash_attention_2"))
    assert varlen.peak == pytest.approx(flash.peak, rel=0.02) and varlen.peak == auto.peak
    saved = [sum(plan.saved_by_layer.values()) for plan in (sdpa, varlen)]
    assert saved[0] - saved[1] == pytest.approx(masks, rel=1e-3)
    assert sdpa.peak - varlen.peak == pytest.approx(masks, rel=1e-2)
    assert "without a mask" in varlen.notes[0] and not sdpa.notes
    sdpa, varlen, stream = (
        plan_configured(config(*names), gpu="h100") for names in (("sdpa",), ("varlen",), ("sdpa", "stream"))
    )
    assert varlen.time.attention == pytest.approx(stream.time.attention)
    assert sdpa.time.attention == pytest.approx(2 * varlen.time.attention)  # no half of it is left out
    assert sdpa.memory.peak - varlen.memory.peak > 0.9 * masks and "without a mask" in varlen.memory.notes[0]


def test_operations_of_windows_are_traced():
    packed_attention.register()
    model = make_model("gemma3_text", VARLEN_MODELS["gemma3_text"], NAME)
    with fake_tensors(), torch.no_grad():
        copy = octavo.planner.fake.fake_copy(model, torch._guards.detect_fake_mode(), torch.device("cpu"))
        own = torch.arange(20)[None]
        with documents(document_offsets(own, 1)):
            traced = trace(copy, {}, lambda: copy(input_ids=own, position_ids=own, use_cache=False))
    keys = sum(min(query + 1, 5) for query in range(20)), 20 * 20 / 2
    assert traced.attention == pytest.approx(4 * 4 * 16 * sum(keys), rel=0.05)  # the window's own half is rounded


@pytest.mark.parametrize("fault", [None, "window", "documents", "raises"])
def test_a_device_is_tried_beside_a_mask(fault, monkeypatch):
    """What `auto` asks a GPU, here with the CPU's own kernel in its place."""
    packed_attention.register()
    original = packed_attention.varlen_attn

    def faulty(q, k, v, offsets, *rest, window_size, **options):
        if fault == "raises":
            raise RuntimeError("no kernel image is available")
        window = (window_size[0] + 1, 0) if fault == "window" and window_size[0] > 0 else window_size
        offsets = offsets[[0, -1]] if fault == "documents" else offsets
        return original(q, k, v, offsets, *rest, window_size=window, **options)

    monkeypatch.setattr(packed_attention, "varlen_attn", faulty)
    with torch.no_grad():  # wherever it is asked
        problem = packed_attention.device_problem.__wrapped__(torch.device("cpu"))
    expected = {None: "", "raises": "no kernel image is available"}.get(fault, "differs from that with a mask")
    assert problem == expected if fault is None else expected in problem
