"""Models of Transformers whose loss is computed in chunks: the numbers of their own loss, family by family."""

import copy
import inspect
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from models import gradients
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from octavo import convert
from octavo.nn.causal import chunked_loss, decide_head, find_head
from octavo.numerics.error import sqnr
from octavo.planner.fake import fake_device, fake_tensors
from octavo.planner.trace import copy_with_blocks
from support.refusals import refused

SIZES = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": None,
}  # fmt: skip
FAMILIES = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 0.05},  # so tight that it shows
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 8.0},
    "phi": {},  # a head with a bias
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "gpt2": None,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.0},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 8.0},
}
ROUTED = ("mixtral", "qwen3_moe", "granitemoe")


def make(kind, **overrides):
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


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind not in ROUTED[1:]])
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
    ("kind", "scale", "softcap", "place"),
    [
        ("llama", 1, None, "fp16"), ("llama", 1, None, "meta"), ("cohere", 0.25, None, "bf16"),
        ("granite", 0.125, None, "no head yet"), ("gemma2", 1, 0.05, "fp32"), ("gemma2", 1, 0.05, "bf16"),
        ("gemma2", 1, 30.0, "fp32"), ("gemma2", 1, 30.0, "fp16"), ("gemma2", 1, 30.0, "no head yet"),
        ("gemma2", 1, 30.0, "meta"),
    ],
)  # fmt: skip
def test_what_a_model_does_to_its_logits_is_found(kind, scale, softcap, place):
    """Logits of a new model are far below a soft cap of 30, and those of a head of zeros are zeros."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(place, torch.float32)
    with torch.device("meta" if place == "meta" else "cpu"):
        model = make(kind, **({"final_logit_softcapping": softcap} if kind == "gemma2" else {})).to(dtype)
    if place == "no head yet":
        torch.nn.init.zeros_(model.lm_head.weight)
    head = find_head(model)
    assert (head.scale, head.softcap) == (scale, softcap)


def test_chunked_on_meta_and_loaded_afterwards():
    with torch.device("meta"):
        model = chunked_loss(make("granite"))
    real = make("granite")
    model.to_empty(device="cpu").load_state_dict(real.state_dict())
    for name, buffer in real.named_buffers():
        model.get_buffer(name).copy_(buffer)
    ours = model(**batch())
    assert ours.logits is None
    torch.testing.assert_close(ours.loss, real(**batch()).loss)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("mixtral", "cannot run the trial on meta; load its weights first: Expected "),
        ("opt", "on meta only storages can be compared"),  # it calls its base model's decoder, not its base model
    ],
)
def test_what_meta_cannot_tell_is_refused_there(kind, message):
    with torch.device("meta"):
        model = make(kind)
    refused(message, chunked_loss, model)
    chunked_loss(make(kind))


def test_without_labels_it_is_as_before():
    model = make("llama").eval()
    ids = batch()["input_ids"]
    expected = model(input_ids=ids).logits
    signature = inspect.signature(model.forward)
    chunked_loss(model)
    assert torch.equal(model(input_ids=ids).logits, expected)
    assert inspect.signature(model.forward) == signature
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False)[:, :13], ids)


@pytest.mark.parametrize(
    "extra",
    [
        {"shift_labels": batch()["input_ids"].roll(-1, 1)},
        {"num_items_in_batch": torch.tensor(11)},
        {"return_dict": False},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_the_other_arguments_of_the_loss(extra):
    model = make("llama")
    expected = model(**batch(), **extra)[0]
    torch.testing.assert_close(chunked_loss(model)(**batch(), **extra)[0], expected)


def test_the_other_outputs_of_a_loss():
    """Under whatever names this release of Transformers gives them."""
    model, ids = make("llama", attn_implementation="eager"), batch()["input_ids"]
    inputs = batch() | {"use_cache": True, "output_hidden_states": True, "output_attentions": True}
    expected = model(**inputs)
    found = chunked_loss(model)(**inputs)
    assert set(found) == set(expected) - {"logits"} and len(found) == 4
    for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(one, other)
    (cache,) = set(found) - {"loss", "hidden_states", "attentions"}
    assert found[cache].get_seq_length() == expected[cache].get_seq_length() == ids.shape[1]


def test_labels_by_position():
    model = chunked_loss(make("llama"))
    arguments = batch()
    names = list(inspect.signature(model.forward).parameters)
    by_position = [arguments.get(name) for name in names[: names.index("labels") + 1]]
    outputs = model(*by_position, use_cache=False)
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss, model(**arguments).loss)
    refused("multiple values for argument 'labels'", model, *by_position, kind=TypeError, labels=arguments["labels"])


@pytest.mark.parametrize("where", ["call", "config"])
def test_with_a_routers_loss_requested_later_a_model_is_whole(where):
    model = make("mixtral")
    ours = chunked_loss(copy.deepcopy(model))
    assert ours(**batch()).logits is None
    asked = {"output_router_logits": True} if where == "call" else {}
    for one in (model, ours):
        one.config.output_router_logits = where == "config"
    expected, actual = model(**batch(), **asked), ours(**batch(), **asked)
    assert actual.aux_loss > 0 and actual.logits is not None
    assert torch.equal(actual.loss, expected.loss)
    assert ours(**batch(), output_router_logits=False).logits is None


def routed(kind="mixtral", **overrides):
    return make(kind, output_router_logits=True, router_aux_loss_coef=0.25, **overrides)


@pytest.mark.parametrize("kind", ROUTED)
def test_a_routers_loss_is_the_models_own(kind):
    """The model's, of all tokens but those that the mask leaves out, added to the loss without whole logits."""
    model = routed(kind)
    ours = chunked_loss(copy.deepcopy(model))
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[1, 9:] = 0
    for extra in ({}, {"attention_mask": mask}, {"num_items_in_batch": 50}):
        expected, actual = model(**batch(), **extra), ours(**batch(), **extra)
        assert actual.logits is None and "logits" not in actual and type(actual) is type(expected)
        assert torch.equal(actual.aux_loss, expected.aux_loss) and len(actual.router_logits) == 2
        torch.testing.assert_close(actual.loss, expected.loss)
    for one, outputs in ((model, expected), (ours, actual)):
        one.zero_grad()
        outputs.loss.backward()
    for (name, param), other in zip(model.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad, param.grad, msg=lambda m, name=name: f"{name}: {m}")
    loss = ours(**batch()).loss
    assert torch.equal(ours(**batch(), return_dict=False)[0], loss)
    assert ours(**batch(), output_router_logits=False).loss < loss
    ours.router_aux_loss_coef = model.router_aux_loss_coef = 0.5
    torch.testing.assert_close(ours(**batch()).loss, model(**batch()).loss)
    assert not ours.model._forward_hooks and ours(input_ids=batch()["input_ids"]).logits.shape == (2, 13, 131)


def test_another_thread_in_the_base_model_does_not_change_a_routed_loss(monkeypatch):
    from transformers.models.mixtral import modeling_mixtral

    ours, balance = chunked_loss(routed()), modeling_mixtral.load_balancing_loss_func
    expected = ours(**batch()).loss

    def after_another(*args):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(ours.model, input_ids=batch()["input_ids"].flip(1)).result()
        return balance(*args)

    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", after_another)
    assert torch.equal(ours(**batch()).loss, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: out.loss + 0.01 * out.aux_loss, "otherwise than as router_aux_loss_coef"),
        (lambda out: out.loss - 0.25 * out.aux_loss, "otherwise than as router_aux_loss_coef"),
        (lambda out: out.loss + 1e-9 * out.logits.square().mean(), "adds a term to the cross-entropy"),
        (lambda out: out.loss + 1e-9 * out.aux_loss * out.logits.mean(), "adds a term to the cross-entropy"),
        (lambda out: out.loss + 1e-9 * out.router_logits[0].square().mean(), "adds a term to the cross-entropy"),
    ],
)
def test_a_routers_loss_of_another_form_is_refused(change, message):
    class Changed(type(make("mixtral"))):
        def forward(self, *args, logits_to_keep=0, **kwargs):
            outputs = super().forward(*args, logits_to_keep=logits_to_keep, **kwargs)
            if outputs.loss is not None:
                outputs.loss = change(outputs)
            return outputs

    refused(message, chunked_loss, Changed(routed().config))


@pytest.mark.parametrize("kind", ["pre-hook", "hook", "forward"])
def test_a_head_that_has_to_be_called_is_called(kind):
    model = make("llama")
    ours = chunked_loss(copy.deepcopy(model))

    def spoil(head):
        own = head.forward
        if kind == "pre-hook":
            return head.register_forward_pre_hook(lambda module, args: (2 * args[0],)).remove
        if kind == "hook":
            return head.register_forward_hook(lambda module, args, output: 2 * output).remove
        head.forward = lambda hidden: 2 * own(hidden)
        return lambda: head.__dict__.pop("forward")

    before = ours(**batch()).loss
    spoil(model.lm_head)
    undo = spoil(ours.lm_head)
    actual = ours(**batch())
    assert actual.logits is not None and torch.equal(actual.loss, model(**batch()).loss)
    assert abs(actual.loss - before) > 1e-3
    undo()
    again = ours(**batch())
    assert again.logits is None and torch.equal(again.loss, before)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda m: m.resize_token_embeddings(140), "its output embedding was replaced"),
        (lambda m: setattr(m, "lm_head", torch.nn.Sequential(m.lm_head)), "its output embedding was replaced"),
        (
            lambda m: convert(m.lm_head, verbose=False),
            r"its output embedding became a torch\.nn\.modules\.linear\.Linear in FP8",
        ),
        (lambda m: setattr(m, "model", copy.deepcopy(m.model)), "its base model was replaced"),
        (lambda m: setattr(m, "loss_function", lambda logits, **_: logits.sum()), "its loss_function was replaced"),
    ],
    ids=["resized", "wrapped", "converted", "base", "loss_function"],
)
def test_what_changes_afterwards_is_refused(change, what):
    model = chunked_loss(make("llama"))
    change(model)
    with pytest.raises(ValueError, match=f"LlamaForCausalLM: {what} after chunked_loss.*del model.forward"):
        model(**batch())
    assert model(input_ids=batch()["input_ids"]).logits is not None


OTHER_LOSSES = {
    "not shifted": lambda logits, labels, **_: F.cross_entropy(logits.float().flatten(0, -2), labels.flatten()),
    "smoothed": lambda logits, labels, **_: F.cross_entropy(
        logits.float().flatten(0, -2), F.pad(labels, (0, 1), value=-100)[..., 1:].flatten(), label_smoothing=0.1),
    "z-loss": lambda logits, **k: ForCausalLMLoss(logits, **k) + 1e-4 * logits.float().logsumexp(-1).square().mean(),
    "mean of each sequence": lambda logits, labels, **k: torch.stack(
        [ForCausalLMLoss(logits[i : i + 1], labels[i : i + 1], **k) for i in range(len(labels))]).mean(),
    "all tokens": lambda logits, labels, **k: ForCausalLMLoss(logits, labels.clamp(min=0), **k),
    "none": lambda logits, **_: None,
}  # fmt: skip


def test_a_term_too_small_for_its_value_to_show_is_found():
    """1e-9 of a z-loss, or of a loss beside the logits; and under FakeTensorMode, which has no values."""
    small = {
        "z": lambda logits: logits.float().logsumexp(-1).square().mean(),
        "beside": lambda logits: model.model.embed_tokens.weight.square().sum(),
    }
    for term in small.values():
        model = make("llama")
        model.loss_function = lambda logits, term=term, **k: ForCausalLMLoss(logits, **k) + 1e-9 * term(logits)
        refused("adds a term to the cross-entropy", chunked_loss, model)
    with FakeTensorMode():
        model = make("llama")
        model.loss_function = OTHER_LOSSES["z-loss"]
        refused("adds a term to the cross-entropy", chunked_loss, model)
        assert chunked_loss(make("granite"))(**batch()).loss.shape == ()  # whose config is believed


@pytest.mark.parametrize("other", OTHER_LOSSES)
def test_a_model_with_another_loss_is_refused(other):
    model = make("llama").to(torch.bfloat16)
    model.loss_function = OTHER_LOSSES[other]
    refused("returns no loss" if other == "none" else "has a loss of its own", chunked_loss, model)
    assert "forward" not in vars(model)
    model.loss_function = lambda logits, **k: ForCausalLMLoss(logits, **k)
    assert chunked_loss(model)(**batch()).logits is None


def changing_logits(change):
    def spoil(model):
        own = model.forward

        def changed(**inputs):
            outputs = own(**inputs)
            outputs.logits = change(outputs.logits)
            return outputs

        model.forward = changed

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: convert(m.lm_head, verbose=False), r"of type torch.nn.modules.linear.Linear in FP8: "),
        (lambda m: setattr(m.config, "output_router_logits", True), "adds its router's loss .* otherwise than as"),
        (lambda m: setattr(m, "lm_head", None), "no output embedding"),
        (lambda m: setattr(m.config, "is_encoder_decoder", True), "decoder's inputs from the labels"),
        (changing_logits(lambda z: z + z.mean(-1, keepdim=True)), "neither a factor nor a soft cap"),
        (changing_logits(lambda z: z[..., :100]), r"returns logits \[2, 8, 100\], but its head returns \[2, 8, 131\]"),
    ],
)  # fmt: skip
def test_models_that_cannot_are_refused_with_the_reason(spoil, message):
    model = make("llama")
    spoil(model)
    before = vars(model).get("forward")
    refused(message, chunked_loss, model)
    assert vars(model).get("forward") is before


# --- a plan and its run compute the same loss, chunked or from whole logits, for every type of model ---

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 2, "d_model": 32,
    "n_layers": 3, "n_heads": 2, "decoder_layers": 3, "encoder_layers": 1, "decoder_attention_heads": 2,
    "encoder_attention_heads": 2, "decoder_ffn_dim": 64, "encoder_ffn_dim": 64, "max_position_embeddings": 64,
    "n_positions": 64, "state_size": 8, "ffn_dim": 64, "num_experts": 2, "num_local_experts": 2, "n_groups": 1,
    "is_decoder": True, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
OWN = {
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2, "chunk_size": 16},
    "flint": {"num_experts_per_tok": 2},
}
DIFFERENT = ("bart", "bert", "biogpt", "falcon_mamba", "mamba2", "minicpm3")
"""Types whose copies of fake tensors cannot find their head by themselves."""
LARGEST = 50_000_000
"""Parameters of the largest model that is built with weights."""


def outcome(model):
    try:
        head = find_head(model)
    except Exception as error:
        return str(error)
    return head.scale, head.softcap, head.routed


def decisions(kind):
    """What a run decides, and what its plan does; skips types that are not built small."""
    with warnings.catch_warnings(action="ignore"):
        try:
            text = CONFIG_MAPPING[kind]().get_text_config()
            config = CONFIG_MAPPING[kind](**{k: v for k, v in (SMALL | OWN.get(kind, {})).items() if hasattr(text, k)})
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        except Exception as error:
            pytest.skip(f"{kind} is not built so small: {error}")
        if sum(p.numel() for p in model.parameters()) > LARGEST:
            pytest.skip(f"{kind} is too large")
        layers = len(list(model.modules()))
        decide_head(model)
        assert len(list(model.modules())) == layers
        with fake_tensors("cuda") as mode:
            planned = outcome(copy_with_blocks(model, {}, mode, fake_device(torch.device("cuda"))))
        return outcome(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)), planned


@pytest.mark.parametrize("kind", [*DIFFERENT, "llama", "gemma2", "granite"])
def test_a_plan_decides_as_its_run(kind):
    run, plan = decisions(kind)
    assert plan == run
    assert isinstance(run, tuple) == (kind in ("llama", "gemma2", "granite", "biogpt"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*DIFFERENT}))
def test_every_type(kind):
    run, plan = decisions(kind)
    assert plan == run


@pytest.mark.slow
def test_experts_do_not_keep_a_plan_from_chunks():
    """The router's loss does not run on meta, nor experts of the size of Mixtral's on stand-ins for their weights."""
    config = CONFIG_MAPPING["mixtral"](num_hidden_layers=4, output_router_logits=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    decide_head(model)
    with fake_tensors("cuda") as mode:
        assert outcome(copy_with_blocks(model, {}, mode, fake_device(torch.device("cuda")))) == (1.0, None, True)
    assert len(model.model.layers) == 4 and not any("forward" in vars(module) for module in model.modules())
