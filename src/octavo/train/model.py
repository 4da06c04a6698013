"""The model: any of `transformers` for the task of the run, from a config or a local checkpoint.

Initial weights are a function of seed and model, for any device and number of threads. `nn.Linear` draws its weights,
and Transformers draws them again: 11 s of one thread for 10⁹ parameters. Here a draw into a whole tensor is recorded,
replaced by the next one, and at the end drawn in chunks on all cores, each with a generator of its own.
"""

import inspect
import os
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from octavo.nn.causal import check_next_token_loss, chunked_loss
from octavo.numerics.suggestions import nearest
from octavo.runtime.torch_compat import TorchDispatchMode, tree_leaves
from octavo.train.checkpoint.kinds import IMAGE_CLASSIFICATION, LANGUAGE, ModelKind
from octavo.train.checkpoint.pretrained import load_model_config, load_pretrained
from octavo.train.config.run_config import ConfigError, TrainConfig, naming, one_line
from octavo.train.config.sections import HUB_NAME, Model, PrecisionConfig, hub_folder
from octavo.train.data.tokenizer import TextTokenizer
from octavo.train.diagnose import non_finite_parameter
from octavo.train.lora import add_adapters, freeze
from octavo.train.packed_attention import NAME, device_problem, problem, register
from octavo.train.ranks import Ranks, share_on_machine

PARAMETER_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


def check_model(model: Model, kind: ModelKind = LANGUAGE) -> None:
    if model.path is not None:
        folder = hub_folder(model.path)
        if not (folder / "config.json").exists():
            problem = f"model.path = {folder} holds no transformers checkpoint: it has no config.json"
            if HUB_NAME.fullmatch(model.path) and not folder.exists():
                problem += f". If it is a model of the Hub, bring it to this machine: hf download {model.path}"
            raise ConfigError(problem)
        return
    from transformers import CONFIG_MAPPING

    if model.type not in kind.classes:
        noun = kind.noun if model.type in CONFIG_MAPPING else "model type"
        article = "an" if noun[0] in "aeiou" else "a"
        hint = nearest(str(model.type), kind.classes)
        raise ConfigError(f'model.type = "{model.type}" is not {article} {noun} of the installed transformers{hint}')
    _check_fields(model.type, model.config)


def build_model(config: TrainConfig, tokenizer: TextTokenizer, *, weights: bool = True) -> Any:
    """Build the language model of a run as `build_of_kind`; vocabulary and context must be enough for the data."""
    end = tokenizer.end_id
    fields = {"vocab_size": tokenizer.size, "bos_token_id": end, "eos_token_id": end, "pad_token_id": None}
    model = build_of_kind(config, LANGUAGE, fields, weights=weights)
    check_fit(model, config.model, config.data.sequence_length, tokenizer)
    return model


def build_of_kind(config: TrainConfig, kind: ModelKind, fields: Mapping[str, Any], *, weights: bool = True) -> Any:
    """Build a model of `kind` on the CPU, in training mode, with parameters of the configured dtype."""
    # `fields`: values for the model's config where it has such fields and `model.config` does not set them. `weights`:
    # whether to load those at `model.path`, or to draw them; for a plan their shapes are enough.
    check_model(config.model, kind)
    dtype = PARAMETER_DTYPES[config.precision.parameters]
    folder = hub_folder(config.model.path) if config.model.path is not None else None
    if folder is not None and weights:
        model = _from_folder(folder, dtype, kind)
        if bad := non_finite_parameter(model):
            raise ConfigError(f"model.path = {folder}: {bad} is not finite in {config.precision.parameters}")
    else:
        from transformers.initialization import no_init_weights

        settings = model_config(config.model, fields)
        make = partial(kind.auto.from_config, settings, dtype=dtype, trust_remote_code=False)
        # Image models read numbers for it, which fake tensors lack. Without it some language models are not tied.
        initialized = folder is not None or weights or kind is LANGUAGE
        where = f"model.config: {config.model.type}" if folder is None else f"model.path = {folder}: the model"
        with naming(f"{where} cannot be built from it"), nullcontext() if initialized else no_init_weights():
            model = draw_once(make, config.run.seed) if folder is None else make()
    choose_attention(model, config.model.attention, kernels=weights)
    model.train()
    freeze(model, config.model.frozen)
    if config.lora is not None:
        add_adapters(model, config.lora, config.run.seed, config.model.path)
    return model


def choose_attention(model: Any, name: str, *, kernels: bool = True) -> None:
    """Set how a model computes attention. Raises ConfigError where it cannot. `kernels`: whether it will run here."""
    if name == "auto":
        return
    kind = type(model).__name__
    if not hasattr(model, "set_attn_implementation"):
        raise ConfigError(f"model.attention = {name!r}: {kind} computes attention in one way; leave it out")
    # A plan needs no kernels: all fused kinds have the memory of "sdpa".
    used = NAME if name == "varlen" else name if kernels or name == "eager" else "sdpa"
    register()
    try:
        model.set_attn_implementation(used)
    except Exception as error:  # of no common type
        reason = one_line(error).rstrip(".")
        raise ConfigError(f"model.attention = {name!r}: {reason}. Nearest: leave it out") from None
    # Transformers warns, and goes on, where classes of the model have no choice.
    configs = (getattr(module, "config", None) for module in model.modules())
    chosen = {str(own) for config in configs if (own := getattr(config, "_attn_implementation", None))}
    if fixed := chosen - {used}:
        raise ConfigError(f"model.attention = {name!r}: parts of {kind} compute it as {', '.join(fixed)}; leave it out")
    if name == "varlen" and (reason := problem(model)):
        raise ConfigError(f'model.attention = "varlen": {reason}. Nearest: "sdpa"')


def auto_attention(model: Any, config: TrainConfig, device: str) -> None:
    """Set variable-length attention if `model.attention = "auto"` may take it on a type of device."""
    own, packed = getattr(model.config, "_attn_implementation", None), config.data.packing != "stream"
    language = config.data.task == "language" and own == "sdpa"
    if config.model.attention != "auto" or not language or not packed or device != "cuda":
        return
    if reason := device_problem():
        MASKED[model] = reason
        return
    try:
        choose_attention(model, "varlen")
    except ConfigError as error:
        model.set_attn_implementation(own)
        MASKED[model] = str(error).removeprefix('model.attention = "varlen": ').removesuffix('. Nearest: "sdpa"')


# Why models whose attention is "auto" read masks of packed documents, for a note
MASKED: "weakref.WeakKeyDictionary[nn.Module, str]" = weakref.WeakKeyDictionary()


def build_on_ranks(
    config: TrainConfig, kind: ModelKind, build: Callable[[], nn.Module], ranks: Ranks
) -> tuple[Any, dict[str, torch.Tensor]]:
    """`build` and `fp32_master_values` on every rank, with one copy of both in the memory of each machine."""
    if config.model.attention == "flex_attention" and ranks.device.type == "cpu":
        raise ConfigError('model.attention = "flex_attention" has no backward on a CPU: take "sdpa", or a GPU')
    if config.model.attention == "varlen":
        register()  # for these, too
        if reason := device_problem(ranks.device):
            raise ConfigError(f'model.attention = "varlen": {reason}. Nearest: "sdpa"')
    start = config.model if config.lora is None else config.model.model_copy(update={"path": None})  # adapters are new
    built = share_on_machine(lambda: (build(), fp32_master_values(start, config.precision, kind)), ranks)
    auto_attention(built[0], config, ranks.device.type)
    if ranks.local:  # received from another process
        kind.make_empty(built[0])
    return built


def prepare_loss(model: nn.Module, loss: str) -> str:
    """Make a model compute its own loss "chunked" or from "whole" logits; returns a note where it cannot be chunked."""
    note = ""
    if loss == "chunked":
        try:
            chunked_loss(model)
            return note
        except Exception as error:  # of no common type: a model that does not run at all fails in its own way below
            note = f"the loss is the model's own, with every term of it, computed from whole logits: {one_line(error)}"
    try:
        check_next_token_loss(model)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except (RuntimeError, IndexError):  # of a model that does not run: what runs the first batch says more
        pass
    return note


def fp32_master_values(source: Model, precision: PrecisionConfig, kind: ModelKind) -> dict[str, torch.Tensor]:
    """fp32 values by name of the 16-bit parameters of a run from a checkpoint, which may hold more bits."""
    if source.path is None or precision.parameters == "fp32" or precision.resolved.master == "none":
        return {}
    model = _from_folder(hub_folder(source.path), torch.float32, kind)
    freeze(model, source.frozen)
    return {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}


def _from_folder(folder: Path, dtype: torch.dtype, kind: ModelKind) -> Any:
    with naming(f"model.path = {folder}", ConfigError):
        return load_pretrained(folder, dtype, kind)


def model_config(source: Model, defaults: Mapping[str, Any]) -> Any:
    """The config of a model: of `model.path`, or of `model.config`, with `defaults` for fields that it has."""
    if source.path is not None:
        folder = hub_folder(source.path)
        with naming(f"model.path = {folder}", ConfigError):
            return load_model_config(folder)
    field_names = _config_fields(str(source.type))
    known = {field: value for field, value in defaults.items() if field in field_names}
    tables = ((name, value) for name, value in source.config.items() if isinstance(known.get(name), dict))
    both = {name: {**known[name], **value} for name, value in tables}
    from transformers import AutoConfig

    with naming(f"model.config: {source.type} rejects it"):  # it writes defaults into tables
        return AutoConfig.for_model(str(source.type), **deepcopy(known | source.config | both))


def _check_fields(model_type: str, config: Mapping[str, Any], key: str = "model.config") -> None:
    from transformers import CONFIG_MAPPING

    field_names = _config_fields(model_type)
    parts = getattr(CONFIG_MAPPING[model_type], "sub_configs", {})
    for field, value in config.items():
        if field not in field_names:
            hint = nearest(field, field_names) or f"; it has {', '.join(sorted(field_names))}"
            raise ConfigError(f"{key}.{field}: {model_type} has no such field{hint}")
        if field in parts and isinstance(value, Mapping):
            part = value.get("model_type") or _defaults(CONFIG_MAPPING[model_type])[field]["model_type"]
            if part not in CONFIG_MAPPING:
                hint = f"is not a model type of the installed transformers{nearest(str(part), CONFIG_MAPPING)}"
                raise ConfigError(f'{key}.{field}.model_type = "{part}" {hint}')
            _check_fields(part, {name: item for name, item in value.items() if name != "model_type"}, f"{key}.{field}")


def _config_fields(model_type: str) -> set[str]:
    """Names a config of `model_type` takes: arguments, aliases, what it serializes, and what the model's code reads."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    fields = {name for name in inspect.signature(config_class).parameters if name not in ("self", "kwargs")}
    fields |= set(config_class.attribute_map)
    fields |= {field for field in _defaults(config_class) if not field.startswith("_") and field != "model_type"}
    if "rope_parameters" in fields:
        fields |= {"rope_theta", "rope_scaling"}  # the older spelling, still read
    if model_type in IMAGE_CLASSIFICATION.classes:
        fields |= {"num_labels"}
    # Optional fields that only the code of the model names, in `getattr`, as `head_dim` of qwen3_moe.
    files = Path(inspect.getfile(config_class)).parent.glob("modeling_*.py")
    texts = [file.read_text(encoding="utf-8") for file in files]
    return fields | {name for text in texts for name in re.findall(r'getattr\((?:self\.)?config, "(\w+)"', text)}


def _defaults(config_class: Any) -> dict[str, Any]:
    try:
        return dict(config_class().to_dict())
    except Exception:  # a few composite configs cannot be made without arguments; each fails in its own way
        return {}


def check_fit(model: Any, source: Model, sequence_length: int, tokenizer: TextTokenizer) -> None:
    if not getattr(model.config, "return_dict", True):
        raise ConfigError("the model's config has return_dict = false, but its loss is read by name: leave it out")
    rows = model.get_input_embeddings().weight.shape[0]
    from_path = source.path is not None
    if rows < tokenizer.size:
        own, size = "give the folder of the model's own tokenizer as data.tokenizer", tokenizer.size
        remedy = own if from_path else f"set model.config.vocab_size = {size}, or leave it out"
        raise ConfigError(f"the model's vocabulary of {rows} is smaller than the tokenizer's {size}: {remedy}")
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(context, int) and -1 < context < sequence_length:
        problem = f"data.sequence_length = {sequence_length} is longer than the model's context of {context}"
        hint = "" if from_path else ", or raise model.config.max_position_embeddings"
        raise ConfigError(f"{problem}: shorten data.sequence_length{hint}")


T = TypeVar("T")

CHUNK = 1 << 20  # Elements that one generator draws
_aten = torch.ops.aten
DRAWS = {_aten.normal_.default, _aten.uniform_.default}  # Overwrite a tensor with random numbers
FILLS = {_aten.zero_.default, _aten.fill_.Scalar}  # Overwrite a tensor with something else
POINTWISE = {
    _aten.erfinv_.default, _aten.mul_.Tensor, _aten.mul_.Scalar, _aten.add_.Tensor, _aten.add_.Scalar,
    _aten.clamp_.default,
}  # fmt: skip
"""Steps of `torch.nn.init.trunc_normal_` after its draw."""


def draw_once(build: Callable[[], T], seed: int) -> T:
    """The model that `build` makes, with initial weights that depend on the seed and on the model alone."""
    torch.manual_seed(seed)  # for what is not drawn into a tensor, as `torch.randn`
    with _Draws(seed) as draws:
        model = build()
    draws.draw(draws.pending.values())
    return model


class _Draw(NamedTuple):
    """A recorded draw into a tensor, and what changes the numbers afterwards."""

    tensor: Tensor  # Of the same storage: a parameter may be given another one, as `weight.data = …`
    first: int  # Number of its first chunk
    steps: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]


class _Draws(TorchDispatchMode):
    """Records draws into whole tensors; whatever else touches such a tensor draws it before."""

    def __init__(self, seed: int) -> None:
        TorchDispatchMode.__init__(self)
        self.pending: dict[int, _Draw] = {}  # by storage, which the tensor keeps alive
        # A generator of the CPU takes 32 bits: consecutive seeds never meet within a model, random ones would.
        self._seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._chunks = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
        if len(tensors) == 1 and _is_whole(first := tensors[0]):
            key = _storage(first)
            if func in DRAWS and kwargs.get("generator") is None:
                self.pending[key] = _Draw(first.detach(), self._chunks, [(func, args[1:], kwargs)])
                self._chunks += -(-first.numel() // CHUNK)
                return first
            if func in POINTWISE and key in self.pending:
                self.pending[key].steps.append((func, args[1:], kwargs))
                return first
            if func in FILLS or func in DRAWS:
                self.pending.pop(key, None)
        touched = map(_storage, tensors)
        self.draw([self.pending.pop(key) for key in touched if key in self.pending])
        return func(*args, **kwargs)

    def draw(self, draws: Iterable[_Draw]) -> None:
        parts = ((draw, enumerate(draw.tensor.view(-1).split(CHUNK))) for draw in draws)
        chunks = [(draw, part, self._seed + draw.first + number) for draw, own in parts for number, part in own]
        if not chunks:
            return
        with ThreadPoolExecutor(min(len(chunks), os.cpu_count() or 1)) as pool:
            list(pool.map(_draw, chunks))


def _draw(chunk: tuple[_Draw, Tensor, int]) -> None:
    draw, part, seed = chunk
    generator = torch.Generator(part.device).manual_seed(seed % 2**32)
    for func, arguments, settings in draw.steps:
        func(part, *arguments, **settings | ({"generator": generator} if func in DRAWS else {}))


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is all of its storage, in order, on the CPU, and has numbers, unlike fake tensors."""
    return (
        type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" and tensor.is_contiguous()
        and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    )  # fmt: skip


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
