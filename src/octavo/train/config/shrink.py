"""`--shrink`: the same architecture, small enough to train on a CPU in two minutes, on data that needs no download.

docs/configurations.md has a table of what becomes how small. Mixtures have fewer layers, which take several times as
long; heads and ranks of latent attention stay so large that FP8 still converts their layers.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from octavo.train.checkpoint.diffusers_models import TYPE as DIT
from octavo.train.config.run_config import Change, ConfigError, flat, naming, parse_config
from octavo.train.config.sections import OF_IMAGES
from octavo.train.model import check_model
from octavo.train.tasks.registry import task_of

WIDTH, LAYERS, QUERIES, KEYS = "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
DENSE_LAYERS = "first_k_dense_replace"
MLPS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
RANKS = ("q_lora_rank", "kv_lora_rank")
HEAD_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
GROUPS, CHOSEN_GROUPS, ACTIVE = "n_group", "topk_group", "num_experts_per_tok"
OF_TOKENIZER = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
UNCHANGED = (  # Integers that stay as they are: sizes of no tensor, or small ones
    "max_position_embeddings", "n_shared_experts", "decoder_sparse_step", "num_nextn_predict_layers", "pretraining_tp",
    "max_window_layers", "sliding_window", "original_max_position_embeddings",
)  # fmt: skip
OF_CLASSIFIER = ("num_labels", "id2label", "label2id", "encoder_stride", "pooler_output_size")
DERIVED = ("qk_head_dim",)  # Integers that a model's config computes from others
SECTIONS: Mapping[str, Mapping[str, Any]] = {  # Settings of a shrunk run
    "run": {"steps": 60},
    "data": {"source": "python-stdlib", "sequence_length": 128, "vocab_size": 4096},
    "optim": {"lr": 2e-3, "batch": 8, "warmup": 6},
}
WITH_IMAGES = {"source": "digits", "sequence_length": 48, "vocab_size": 300}  # `[data]` of one with images
CONVERSATIONS = {"source": "python-docstrings", "format": "messages", "chat_template": "plain"}  # and with those
IMAGES = {"source": "digits"}  # `[data]` and `[optim]` of one with images alone
IMAGES_OPTIM = {"lr": 5e-4, "batch": 32}  # with those of text a ViT does not learn in 60 steps
OF_SOURCE = (  # Settings of `[data]` that belong to its source
    "sources", "split", "text_field", "messages_field", "tokenizer", "images", "streaming", "chunk_bytes", "cache_gib",
)  # fmt: skip
TEXT_DATA = ("sequence_length", "vocab_size")
PATCHES = 4  # Patches of a shrunk image in each direction


def shrink(tables: Mapping[str, Any], model_config: Mapping[str, Any]) -> dict[str, Any]:
    small = {name: dict(section) for name, section in deepcopy(dict(tables)).items() if name != "parallel"}
    model_type, given = str(small["model"]["type"]), small["model"].get("config", {})
    has_images = {"vision_config", "text_config"} <= model_config.keys()
    data = tables["data"]
    chats = any(part.get("format") == "messages" for part in (data, *data.get("sources", ())))
    of_images = small["data"].get("task") in OF_IMAGES
    shrinks = _shrink_images if of_images else _shrink_parts if has_images else shrink_model
    small["model"]["config"] = shrinks(model_type, given, model_config)
    for name, settings in SECTIONS.items():
        small[name] |= settings
    if of_images:
        small["data"] = {**{key: value for key, value in small["data"].items() if key not in TEXT_DATA}, **IMAGES}
        small["optim"] |= IMAGES_OPTIM
    small["data"] |= WITH_IMAGES if has_images else CONVERSATIONS if chats else {}
    for key in OF_SOURCE:
        small["data"].pop(key, None)
    for key in ("source", "split"):
        small.get("eval", {}).pop(key, None)
    run, optim = small["run"], small["optim"]
    run.pop("out", None)
    run |= {"name": f"{run.get('name', 'run')}-shrunk", "save_every": min(run.get("save_every", 0), run["steps"] // 2)}
    optim["micro_batches"] = min(optim.get("micro_batches", 1), 2)
    return small


def _shrink_images(model_type: str, given: Mapping[str, Any], complete: Mapping[str, Any]) -> dict[str, Any]:
    """`shrink_model` for a model of images, or a vision tower; the number of classes is left to the data."""
    patch = complete["patch_size"]
    if model_type == DIT:
        heads, layers = complete[QUERIES], complete["num_layers"]
        while heads % 2 == 0 and heads * complete["attention_head_dim"] > 256:
            heads //= 2
        others = {name: value for name, value in given.items() if name != "num_embeds_ada_norm"}
        return others | {QUERIES: heads, "num_layers": _halve(layers, 4), "sample_size": PATCHES * patch}
    own = {"patch_size": patch, "image_size": PATCHES * patch, "num_channels": complete["num_channels"]}
    left_out = {*own, *OF_CLASSIFIER}
    parts = [{name: value for name, value in fields.items() if name not in left_out} for fields in (given, complete)]
    return shrink_model(model_type, *parts) | own


def _shrink_parts(model_type: str, given: Mapping[str, Any], complete: Mapping[str, Any]) -> dict[str, Any]:
    small = dict(given)
    for name, shrinks in (("text_config", shrink_model), ("vision_config", _shrink_images)):
        small[name] = shrinks(complete[name]["model_type"], dict(given.get(name, {})), complete[name])
    return small


def shrink_model(model_type: str, given: Mapping[str, Any], complete: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a model's config with its sizes divided by powers of two."""
    has_latent_attention = complete.get("kv_lora_rank") is not None
    _check_fields(model_type, given, complete, has_latent_attention)
    width = _halve(complete[WIDTH], 256)
    divisor = complete[WIDTH] // width
    keys = complete.get(KEYS) or complete[QUERIES]
    by = 1
    while complete[QUERIES] // by > 8 and keys // by >= 4 and complete[QUERIES] % (2 * by) == keys % (2 * by) == 0:
        by *= 2
    experts = next((name for name in EXPERTS if complete.get(name)), None)
    layers = _halve(complete[LAYERS], 4 if experts is None else 2)
    sizes = {LAYERS: layers, WIDTH: width, QUERIES: complete[QUERIES] // by, KEYS: keys // by}
    sizes |= {name: complete[name] // divisor for name in MLPS if complete.get(name)}
    if has_latent_attention:
        sizes |= {name: _halve_down_to(complete[name], 128) for name in RANKS if complete.get(name)}
        sizes |= {name: _halve_down_to(complete[name], 64) for name in HEAD_SIZES}
    elif "head_dim" in complete:
        sizes["head_dim"] = _halve_down_to(complete["head_dim"] or complete[WIDTH] // complete[QUERIES], 64)
    if complete.get(DENSE_LAYERS):
        sizes[DENSE_LAYERS] = 1
    if experts is not None:
        sizes |= {experts: _halve(complete[experts], 8), ACTIVE: _halve(complete[ACTIVE], 2)}
        if complete.get(GROUPS):
            sizes |= {GROUPS: _halve(complete[GROUPS], 2), CHOSEN_GROUPS: min(complete[CHOSEN_GROUPS], 1)}
    others = {name: value for name, value in given.items() if name not in (*sizes, *EXPERTS, *OF_TOKENIZER)}
    return {**{name: size for name, size in sizes.items() if name in complete}, **others}


def change_of(shrinks: bool, note: Callable[[str], None] = lambda text: None) -> Change:
    """Return the `change` of `load_config`: one that shrinks a configuration, or none; `note` receives the changes."""
    if not shrinks:
        return dict

    def change(tables: Mapping[str, Any]) -> dict[str, Any]:
        config = parse_config(tables)
        model = config.model
        if model.type is None:
            problem = f"--shrink makes a small model of random weights, and model.path = {model.path} is a checkpoint"
            raise ConfigError(f"{problem}: give model.type and model.config with the fields of its config.json")
        check_model(model, task_of(config).kind)
        small = shrink(tables, complete_config(model.type, model.config))
        old, new = dict(flat("", tables)), dict(flat("", small))
        different = (key for key in dict.fromkeys((*old, *new)) if old.get(key) != new.get(key))
        changes = (f"{key} {old.get(key, 'unset')} → {new.get(key, 'unset')}" for key in different)
        note(f"shrunk: {'; '.join(changes)}")
        return small

    return change


def complete_config(model_type: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    from transformers import AutoConfig

    with naming(f"model.config: {model_type} refuses it"):
        return dict(AutoConfig.for_model(model_type, **deepcopy(dict(fields))).to_dict())


def _check_fields(
    model_type: str, given: Mapping[str, Any], complete: Mapping[str, Any], has_latent_attention: bool
) -> None:
    if missing := [name for name in (WIDTH, LAYERS, QUERIES) if not complete.get(name)]:
        raise ConfigError(f"--shrink cannot shrink {model_type}: its config has no {missing[0]}")
    known = {WIDTH, LAYERS, QUERIES, KEYS, DENSE_LAYERS, GROUPS, CHOSEN_GROUPS, ACTIVE, "head_dim"}
    known |= {*MLPS, *EXPERTS, *OF_TOKENIZER, *UNCHANGED, *DERIVED}
    known |= {*RANKS, *HEAD_SIZES} if has_latent_attention else set()
    for name, value in {**complete, **given}.items():
        is_size = isinstance(value, int) and not isinstance(value, bool) and value > 1
        # Lists of a config's own default follow from its number of layers.
        is_list = isinstance(value, list) and bool(value) and (name in known or name in given)
        if is_list or (is_size and name not in known) or (name in EXPERTS and value and not complete.get(ACTIVE)):
            problem = f"it does not know what model.config.{name} = {value} has to be in a small model"
            hint = "write a small configuration by hand, as configs/demo.toml"
            raise ConfigError(f"--shrink cannot shrink {model_type}: {problem}; {hint}")


def _halve(size: int, most: int) -> int:
    while size > most:
        size = (size + 1) // 2
    return size


def _halve_down_to(size: int, least: int) -> int:
    while size % 2 == 0 and size // 2 >= least:
        size //= 2
    return size
