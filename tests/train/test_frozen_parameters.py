"""Frozen parameters: tied ones, and the note on those that a run does not train."""

from typing import Any

import pytest
import torch
from tiny_runs import LLAMA, MakeConfig, Recorder
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.train import ConfigError, run
from octavo.train.frozen import freeze, freeze_unused, frozen_note


def llama(**changes: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(vocab_size=300, **LLAMA | changes))


@pytest.mark.parametrize(
    ("pattern", "frozen", "other"),
    [
        ("lm_head", "lm_head.weight", r'freeze both \("model.embed_tokens"\)'),
        ("embed_tokens", "model.embed_tokens.weight", r'freeze both \("lm_head"\)'),
        ("model", "model.embed_tokens.weight", r'freeze both \("lm_head"\)'),
    ],
)
def test_half_of_a_tied_pair(pattern: str, frozen: str, other: str) -> None:
    with pytest.raises(ConfigError, match=f"freezes {frozen}, which is also .* {other}"):
        freeze(llama(tie_word_embeddings=True), [pattern])
    untied = llama(tie_word_embeddings=False)
    freeze(untied, [pattern])
    assert any(parameter.requires_grad for parameter in untied.parameters())


def test_the_note_counts_tied_parameters_once_and_names_those_without_gradients() -> None:
    model = llama(tie_word_embeddings=True)
    assert frozen_note(model, []) == ""
    freeze(model, ["lm_head", "embed_tokens"])
    total = sum(parameter.numel() for parameter in model.parameters())
    assert frozen_note(model, ["lm_head", "embed_tokens"]) == (
        f"9,600 of {total:,} parameters are not trained: 9,600 by model.frozen"
    )
    model = llama()
    freeze_unused(model, lambda copy: copy.model.layers[0].mlp(torch.ones(1, 1, 32)).sum())
    assert "that no gradient reaches (model.embed_tokens, model.layers.0.self_attn.q_proj, " in frozen_note(model, [])
    model.model.norm.weight.requires_grad_(False)
    assert ";" not in frozen_note(model, []) and "32 by model.frozen; " in frozen_note(model, ["norm"])


def test_a_run_prints_what_it_does_not_train(make_config: MakeConfig, tmp_path: Any) -> None:
    seen = Recorder()
    model = {"type": "llama", "config": LLAMA, "frozen": ["*norm*"]}
    run(make_config(model=model, run={"steps": 1}, optim={"warmup": 0}), out=tmp_path, progress=seen)
    assert any(note.startswith("224 of ") and note.endswith("224 by model.frozen") for note in seen.notes)
