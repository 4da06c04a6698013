"""Load a checkpoint into a model with resident weights, one tensor at a time.

    with octavo.nn.meta_parameters():                       # no memory for weights
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    octavo.convert(model, "rowwise", frozen="fp8")          # decides the format of each weight
    octavo.nn.load_frozen(model, "folder", device="cuda")   # reads, moves and quantizes tensor after tensor

At any moment one tensor exists in high precision, besides those that stay in it (embeddings, head, norms). That of the
experts of a layer is the largest: published checkpoints store each expert by itself, and one by one they fill it.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from octavo.nn.checkpoint_names import parts_in_checkpoint
from octavo.nn.frozen import stores_transposed
from octavo.nn.report import check_module
from octavo.nn.resident import ResidentWeight
from octavo.nn.resident_state import SCALE_SUFFIX, scale_as_stored, scale_of_stored
from octavo.numerics.formats import SUPPORTED_DTYPES
from octavo.numerics.spec import ADAPTIVE, ROW, MessageSpec, QuantSpec
from octavo.runtime.extras import needs_extras
from octavo.runtime.swap import all_or_nothing

M = TypeVar("M", bound=nn.Module)


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Build modules with parameters on the meta device and buffers where they are made, as rotary frequencies.

    Under `torch.device("meta")` instead, buffers that no checkpoint stores would have no values. Applies to modules
    that any thread builds inside.

    Examples:
        >>> with octavo.nn.meta_parameters():
        ...     layer = torch.nn.Linear(64, 64)
        >>> layer.weight.device.type
        'meta'
    """

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(on_meta)
    try:
        yield
    finally:
        handle.remove()


def load_frozen(model: M, path: str | Path, *, device: str | torch.device = "cpu") -> M:
    """Load safetensors into a model, tensor by tensor; weights that are resident in FP8 are quantized one by one.

    Args:
        model: After `octavo.convert(model, frozen="fp8")` and before `get_peft_model`. Parameters on the meta device
            are made on `device`, in their dtype; others are overwritten.
        path: A safetensors file, or a folder as `save_pretrained` writes it: `model.safetensors`, or the files of
            `model.safetensors.index.json`. Without either, all safetensors files of the folder. Names are those of
            `model.state_dict()`, or of the published checkpoints of a Transformers model, which store each expert by
            itself. A resident weight may be stored in high precision, or in FP8 with its scales, which it keeps,
            named `weight_scale`, or `weight_scale_inv` as in DeepSeek's layout.
        device: Where parameters on the meta device go. Buffers stay where they are: `model.to(device)` moves them.

    Returns:
        The same model.

    Raises:
        FileNotFoundError: If there is no safetensors file.
        ValueError: If a file is damaged, two files have a tensor of one name, tensors are missing or of another shape
            or format, or buffers on the meta device are in no file. Nothing was loaded then. Tensors that the model
            lacks give a warning.

    Examples:
        >>> from safetensors.torch import save_file
        >>> save_file(torch.nn.Sequential(torch.nn.Linear(64, 64)).state_dict(), "base.safetensors")
        >>> with octavo.nn.meta_parameters():
        ...     model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> model = octavo.convert(model, frozen="fp8")
        >>> octavo.nn.load_frozen(model, "base.safetensors")[0].weight
        ResidentWeight([64, 64], e4m3/row)
    """
    check_module("load_frozen", model)
    stored = _stored(Path(path).expanduser())
    slots = _slots(model)
    _check(slots, stored, path, model)
    with all_or_nothing(model), torch.no_grad():
        for slot in slots:
            slot.load(*slot.read(model, stored), device)
    return model


@dataclass
class _Slot:
    """A parameter or persistent buffer with its names and the dictionaries of modules that hold it.

    `parts` are the tensors of the checkpoint that have its values, by name, on the meta device; `scales` those with its
    scales, by the same names, if it is resident in FP8. `others` are the formats that it may have instead of adaptive
    FP8, without another rounding: its products read any. As checkpoints in FP8 have it, or its recipe without
    `weight_only`.
    """

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    holders: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    parts: dict[str, Tensor] = field(default_factory=dict)
    scales: dict[str, Tensor] = field(default_factory=dict)
    others: list[QuantSpec] = field(default_factory=list)
    stored_name: str = ""

    def find(self, model: nn.Module, stored: Mapping[str, Any]) -> None:
        """Find the tensors of the checkpoint that have its values; none if they are not all there."""
        old = self.tensor
        scale = scale_as_stored(old.scale, old.spec).to("meta") if isinstance(old, ResidentWeight) else None
        for name in self.names:
            if name in stored:
                self.stored_name, self.parts = name, {name: torch.empty(old.shape, dtype=old.dtype, device="meta")}
                self.scales = {} if scale is None else {name: scale}
                return
        for name in self.names:
            parts = parts_in_checkpoint(model, name, torch.empty(old.shape, dtype=old.dtype, device="meta"))
            if parts and all(part in stored for part in parts):
                self.stored_name, self.parts = name, parts
                self.scales = {} if scale is None else parts_in_checkpoint(model, name, scale)
                return

    def read(self, model: nn.Module, stored: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return the values, and the scales if the checkpoint has some."""
        first = next(iter(self.parts))
        with_scales = isinstance(self.tensor, ResidentWeight) and (scale_name := _scale_name(first, stored)) in stored
        if list(self.parts) == [self.stored_name]:
            scale = stored[scale_name].get_tensor(scale_name) if with_scales else None
            return stored[first].get_tensor(first), scale
        dtype = _DTYPES.get(stored[first].get_slice(first).get_dtype(), torch.float32)
        value = torch.empty(self.tensor.shape, dtype=dtype, device="cpu")
        bits = value.view(torch.uint8) if dtype in _FP8 else value
        for name, part in parts_in_checkpoint(model, self.stored_name, bits).items():
            source = stored[name].get_tensor(name)
            part.copy_(source.view(torch.uint8) if dtype in _FP8 else source)
        if not with_scales:
            return value, None
        assert isinstance(self.tensor, ResidentWeight)
        scale = torch.empty(self.tensor.scale.shape, dtype=self.tensor.scale.dtype, device="cpu")
        for name, part in parts_in_checkpoint(model, self.stored_name, scale).items():
            name = _scale_name(name, stored)
            part.copy_(stored[name].get_tensor(name))
        return value, scale

    def spec_of_bytes(self, dtype: torch.dtype | None, scale_shape: list[int]) -> MessageSpec:
        """Return the format of stored bytes for a resident weight, which fits them if any does."""
        assert isinstance(self.tensor, ResidentWeight)
        of_dtype: list[MessageSpec] = [spec for spec in self.others if spec.format.dtype == dtype]
        of_dtype = of_dtype or [self.tensor.spec]
        return next((spec for spec in of_dtype if self.scale_shape(spec) == scale_shape), of_dtype[0])

    def scale_shape(self, spec: MessageSpec) -> list[int]:
        """Return the shape of the scales of a matrix in another format."""
        return list(spec.granularity.scale_shape((self.tensor.shape[-2], self.tensor.shape[-1])))

    def load(self, value: Tensor, scale: Tensor | None, device: str | torch.device) -> None:
        """Set the values; on the meta device by a new tensor on `device`."""
        old, replaces = self.tensor, self.tensor.is_meta
        target = device if old.is_meta else old.device
        if isinstance(old, ResidentWeight):
            if scale is not None:  # copied, because what safetensors returns may be mapped to the file
                spec = self.spec_of_bytes(value.dtype, list(scale.shape))
                data, scale = (part.to(target, copy=True) for part in (value, scale_of_stored(scale, spec)))
                new: Tensor = ResidentWeight(data, scale, spec, old.dtype)
                replaces = replaces or spec != old.spec
            else:
                plain = value if value.dtype in SUPPORTED_DTYPES else value.float()
                new = ResidentWeight.quantized(plain.to(target), old.spec).to(old.dtype)
        else:
            new = value.to(target, old.dtype, copy=True)
        if not replaces:
            old.copy_(new)
            return
        loaded = nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new
        for holder, name in self.holders:
            holder[name] = loaded


def _slots(model: nn.Module) -> list[_Slot]:
    slots: dict[int, _Slot] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        buffers = {name for name in module._buffers if name not in module._non_persistent_buffers_set}
        for holder, names in ((module._parameters, set(module._parameters)), (module._buffers, buffers)):
            for name in names:
                tensor: Any = holder[name]
                if tensor is not None:
                    slot = slots.setdefault(id(tensor), _Slot(tensor))
                    slot.names.append(f"{prefix}.{name}".lstrip("."))
                    slot.holders.append((holder, name))
                    if isinstance(tensor, ResidentWeight) and tensor.spec == ADAPTIVE and hasattr(module, "recipe"):
                        specs = (module.recipe.w, QuantSpec(granularity=ROW))
                        slot.others += [spec.transposed if stores_transposed(module) else spec for spec in specs]
    return list(slots.values())


def _check(slots: list[_Slot], stored: Mapping[str, Any], path: str | Path, model: nn.Module) -> None:
    """Raise ValueError if the tensors of a checkpoint do not fit a model."""
    for slot in slots:
        slot.find(model, stored)
    missing = [slot.names[0] for slot in slots if not slot.parts]
    known = {name for slot in slots for name in (*slot.names, *slot.parts)}
    known |= {_scale_name(name, stored) for slot in slots for name in (*slot.names, *slot.scales) if slot.scales}
    unknown = [name for name in stored if name not in known]
    others = f"{len(unknown)} tensors that the model lacks ({_first(unknown)})" if unknown else "no others"
    if missing:
        raise ValueError(
            f"load_frozen: {path} lacks {len(missing)} tensors of the model ({_first(missing)}), and has {others}. "
            "Names must be those of model.state_dict(): call load_frozen on the base model, before get_peft_model. "
            "Nothing was loaded"
        )
    loaded = {name for slot in slots for name in slot.names}
    buffers = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in loaded]
    if buffers:
        raise ValueError(
            f"load_frozen: {len(buffers)} buffers on the meta device are in no checkpoint ({_first(buffers)}): build "
            "the model inside octavo.nn.meta_parameters(), not torch.device('meta'). Nothing was loaded"
        )
    for slot in slots:
        for name, part in slot.parts.items():
            if (problem := _misfit(name, part, slot, stored, path)) is not None:
                raise ValueError(f"load_frozen: {problem}. Nothing was loaded")
    if unknown:
        warnings.warn(f"load_frozen: {path} has {others}: not loaded", stacklevel=3)


def _misfit(name: str, part: Tensor, slot: _Slot, stored: Mapping[str, Any], path: str | Path) -> str | None:
    """Return why a stored tensor, or its scales, do not fit a part of a slot, or None."""
    resident = slot.tensor if isinstance(slot.tensor, ResidentWeight) else None
    scale_name = _scale_name(name, stored)
    has_scales = resident is not None and scale_name in stored
    shape, dtype = _stored_shape(name, stored)
    if shape != list(part.shape):
        return f"{name} in {path} has shape {shape}, the model's has {list(part.shape)}"
    expected: tuple[torch.dtype, ...] = (*SUPPORTED_DTYPES, torch.float64)
    if resident is not None and has_scales:
        expected = tuple({resident.data_.dtype: 0} | {spec.format.dtype: 0 for spec in slot.others})
        scale_shape, scale_dtype = _stored_shape(scale_name, stored)
        spec = slot.spec_of_bytes(dtype, scale_shape)
        own = list(slot.scales[name].shape) if spec == resident.spec else slot.scale_shape(spec)
        if dtype in expected and scale_shape != own:
            return f"{scale_name} in {path} has shape {scale_shape}, the model's has {own}: convert in its recipe"
        dtypes = (torch.int32,) if dtype == torch.uint8 else SUPPORTED_DTYPES
        if dtype in expected and scale_dtype not in dtypes:
            got = stored[scale_name].get_slice(scale_name).get_dtype()
            return f"{scale_name} in {path} has dtype {got}; expected {_either(dtypes)}"
    if not part.is_floating_point() or dtype in expected or (resident is None and dtype == part.dtype):
        return None
    problem = f"{name} in {path} has dtype {stored[name].get_slice(name).get_dtype()}"
    if dtype in _FP8 and resident is None:
        problem += ", but its layer is not resident in FP8"
    elif resident is not None and not has_scales and dtype in (*_FP8, torch.uint8):
        problem += f", without scales ({scale_name})"
    return f"{problem}; expected {_either(expected)}"


def _scale_name(name: str, stored: Mapping[str, Any]) -> str:
    """Return the name of a weight's scales: Octavo's, or that of DeepSeek's layout, which multiply all the same."""
    return inverse if (inverse := f"{name}_scale_inv") in stored else name + SCALE_SUFFIX


def _stored_shape(name: str, stored: Mapping[str, Any]) -> tuple[list[int], torch.dtype | None]:
    part = stored[name].get_slice(name)
    return part.get_shape(), _DTYPES.get(part.get_dtype())


def _either(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(str, dtypes))


_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": _FP8[0],
    "F8_E5M2": _FP8[1], "U8": torch.uint8, "I32": torch.int32,
}  # fmt: skip


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _stored(path: Path) -> dict[str, Any]:
    """Return the reader of each tensor of a checkpoint, by name."""
    with needs_extras("octavo.nn.load_frozen"):
        from safetensors import SafetensorError, safe_open
    stored: dict[str, Any] = {}
    files: dict[str, Path] = {}
    for file in _files(path):
        try:
            reader: Any = safe_open(file, framework="pt", device="cpu")
        except SafetensorError as error:
            raise ValueError(f"load_frozen: {file} is damaged: {error}. Nothing was loaded") from None
        for name in reader.keys():
            if name in stored:
                raise ValueError(
                    f"load_frozen: {files[name]} and {file} both have {name}: give the path of one file, or a folder "
                    "with model.safetensors or its index. Nothing was loaded"
                )
            stored[name], files[name] = reader, file
    return stored


def _files(path: Path) -> list[Path]:
    """Return the files that `from_pretrained` would read."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    whole, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if whole.is_file():
        files = [whole]
    elif index.is_file():
        try:
            files = sorted({path / name for name in json.loads(index.read_text("utf-8"))["weight_map"].values()})
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"load_frozen: {index} is damaged: {type(error).__name__}: {error}") from None
    if not path.exists():
        raise FileNotFoundError(f"load_frozen: there is no file or folder {path}")
    if not files:
        raise FileNotFoundError(f"load_frozen: {path} has no *.safetensors file; save_pretrained writes them")
    if missing := [file.name for file in files if not file.is_file()]:
        raise FileNotFoundError(f"load_frozen: {path} lacks {_first(missing)}, which {index.name} lists")
    return files
