"""Packed documents: rows, losses of documents as on their own, models that would mix them, ranks and resume."""

from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import LLAMA, load, slow
from transformers import AutoModelForCausalLM

from octavo.nn.causal import IGNORE
from octavo.train import ConfigError
from octavo.train.data.corpus import PackedRows, best_fit
from octavo.train.probe import check_causal
from octavo.train.tasks.language import _named
from octavo.train.trainer import Trainer

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
    config = make_config(
        model={"type": kind, "config": fields}, data=PACKED | lines, precision={"parameters": "fp32"}
    )  # fmt: skip
    data = load(config)
    trainer = Trainer(config, data, torch.device("cpu"))
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
    config = make_config(model={"type": kind, "config": fields}, data=PACKED | lines)
    data = load(config)
    with pytest.raises(ConfigError, match=message):
        Trainer(config, data, torch.device("cpu")).check_causal()


def test_the_probe_finds_a_model_that_ignores_positions(make_config, lines):
    data = load(make_config(data=PACKED | lines))
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, **LLAMA))
    inputs, _ = data.batch(0, 0, 1)
    check_causal(model, lambda rows: model(**_named(rows), use_cache=False).logits, inputs)
    with pytest.raises(ConfigError, match="depend on the document packed before it"):
        check_causal(model, lambda rows: model(input_ids=rows[..., 0], use_cache=False).logits, inputs)


@pytest.mark.thorough
def test_gradients_are_of_the_mean_over_all_targets(make_config, lines):
    """For micro-batches with other numbers of targets, beside a plain loop in fp32."""
    config = make_config(
        data=PACKED | lines, precision={"parameters": "fp32", "loss": "whole"}, optim={"batch": 8, "micro_batches": 4}
    )
    data = load(config)
    trainer = Trainer(config, data, torch.device("cpu"))
    trainer._autocast = nullcontext  # all of it in fp32
    inputs, targets = data.batch(3, 0, 8)
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
