"""Models of Transformers whose loss is computed in chunks: the numbers of their own loss, family by family."""

import copy
import inspect

import pytest
import torch
from models import gradients

from octavo import convert
from octavo.nn.causal import chunked_loss, find_head
from octavo.numerics.error import sqnr

SIZES = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
FAMILIES = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 0.05},  # so tight that it shows
    "gemma3_text": {"head_dim": 8, "final_logit_softcapping": None},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 8.0},
    "phi": {},  # a head with a bias
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "gpt2": None,
}


def make(kind, **overrides):
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = SIZES | FAMILIES[kind] if FAMILIES[kind] is not None else {
        "vocab_size": 131, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(fields | overrides)))
    return model.train()


def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 131, (2, 13), generator=generator)
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels, "use_cache": False}


@pytest.mark.parametrize("kind", FAMILIES)
def test_loss_and_gradients_are_the_models_own(kind):
    model = make(kind)
    ours = chunked_loss(copy.deepcopy(model))
    expected, actual = model(**batch()), ours(**batch())
    assert actual.logits is None
    torch.testing.assert_close(actual.loss, expected.loss)
    expected.loss.backward()
    actual.loss.backward()
    want, got = gradients(model), gradients(ours)
    assert want.keys() == got.keys()
    largest = max(gradient.abs().max() for gradient in want.values())
    for name in want:  # the softmax makes the gradient of k's bias zero but for rounding
        assert want[name].abs().max() < 1e-6 * largest or sqnr(want[name], got[name]) > 90, name


@pytest.mark.parametrize(
    ("kind", "scale", "softcap"),
    [("llama", 1, None), ("cohere", 0.25, None), ("granite", 0.125, None), ("gemma2", 1, 0.05)],
)
def test_what_a_model_does_to_its_logits_is_found(kind, scale, softcap):
    head = find_head(make(kind))
    assert (head.scale, head.softcap) == (scale, softcap)


def test_without_labels_it_is_as_before():
    model = make("llama").eval()
    ids = batch()["input_ids"]
    expected = model(input_ids=ids).logits
    signature = inspect.signature(model.forward)
    chunked_loss(model)
    assert torch.equal(model(input_ids=ids).logits, expected)
    assert inspect.signature(model.forward) == signature
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False)[:, :13], ids)


@pytest.mark.parametrize("form", ["shift_labels", "num_items_in_batch", "return_dict"])
def test_the_other_arguments_of_the_loss(form):
    model = make("llama")
    extra = {
        "shift_labels": {"shift_labels": batch()["input_ids"].roll(-1, 1)},
        "num_items_in_batch": {"num_items_in_batch": torch.tensor(11)},
        "return_dict": {"return_dict": False},
    }[form]
    expected = model(**batch(), **extra)[0]
    torch.testing.assert_close(chunked_loss(model)(**batch(), **extra)[0], expected)


def test_tied_and_frozen_heads():
    tied = make("llama", tie_word_embeddings=True)
    ours = chunked_loss(copy.deepcopy(tied))
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    tied(**batch()).loss.backward()
    ours(**batch()).loss.backward()
    torch.testing.assert_close(gradients(ours), gradients(tied))
    frozen = chunked_loss(make("llama"))
    frozen.lm_head.weight.requires_grad_(False)
    frozen(**batch()).loss.backward()
    assert frozen.lm_head.weight.grad is None and frozen.model.embed_tokens.weight.grad is not None


def test_a_model_stays_in_the_mode_it_was_in_and_a_copy_is_its_own():
    model = make("gpt2")
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    chunked_loss(model)
    assert [module.training for module in model.modules()] == modes
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
        assert not torch.equal(twin.eval()(**batch()).loss, model.eval()(**batch()).loss)


def test_works_with_fp8_layers():
    model = convert(make("llama"), verbose=False)
    expected = model(**batch()).loss
    torch.testing.assert_close(chunked_loss(model)(**batch()).loss, expected)


def test_a_model_that_no_candidate_explains_is_refused():
    model = make("llama")
    own = model.forward

    def shifted(**kwargs):
        outputs = own(**kwargs)
        outputs.logits = outputs.logits + outputs.logits.mean(-1, keepdim=True)
        return outputs

    model.forward = shifted
    with pytest.raises(ValueError, match="neither a factor nor a soft cap"):
        chunked_loss(model)
    assert model.forward is shifted


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: convert(m.lm_head, verbose=False), "output embedding of type Linear: the chunked loss multiplies"),
        (lambda m: setattr(m.config, "output_router_logits", True), "router"),
        (lambda m: setattr(m, "lm_head", None), "no output embedding"),
    ],
)  # fmt: skip
def test_models_that_cannot_are_refused_with_the_reason(spoil, message):
    model = make("llama")
    spoil(model)
    with pytest.raises(ValueError, match=message):
        chunked_loss(model)
    assert "forward" not in vars(model)


def test_not_a_language_model():
    with pytest.raises(ValueError, match="Linear has no output embedding"):
        chunked_loss(torch.nn.Linear(2, 2))
