"""octavo.export: write a converted model as a checkpoint in FP8, for vLLM, SGLang and Transformers.

    state_dict ─▶ names and shapes of the published checkpoint ─▶ FP8 values and scales ─▶ save_pretrained
                  (Transformers' own reverse mapping)             (octavo.kernels.quantize, as in forward)

A layer is written in FP8 if training multiplied by exactly those values: its recipe is the layout's, and quantizing
the tensors of the checkpoint gives the bytes that quantizing its parameter gives. The second can fail for experts:
a block of 128 rows may belong to gate and up, which the checkpoint stores apart. Others stay in high precision.
"""

import copy
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.activations.detect import original_class
from octavo.kernels import quantize
from octavo.nn.experts import Experts, is_converted_experts
from octavo.nn.frozen import names_in_checkpoint
from octavo.nn.linear_like import LinearLike
from octavo.nn.linear_subclasses import is_converted
from octavo.nn.report import report
from octavo.nn.resident import SCALE_SUFFIX, ResidentWeight
from octavo.nn.resident import resident_weights as resident_in
from octavo.numerics.suggestions import listed
from octavo.runtime.extras import needs_extras
from octavo.serving.folder import LAYOUTS, Exported, ExportLayout, get_layout, model_card, new_folder, write_errors
from octavo.tensor import ScaledTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # Layers that vLLM computes as one


def export(
    model: "PreTrainedModel", path: str | Path, *, to: str = "fp8-row", max_shard_size: int | str = "50GB",
    details: Mapping[str, str] | None = None,
) -> Exported:  # fmt: skip
    """Write a converted Transformers model as a checkpoint in FP8, with its configuration and a model card.

    The FP8 values are those that the model multiplies by; of weights that are resident in FP8, the bytes. Layers in
    another recipe than the layout's keep their dtype, with a warning, and so do layers that were not converted.

    Args:
        model: A model of Transformers after `octavo.convert`; unchanged. Not sharded: `octavo export` reads sharded
            checkpoints.
        path: A folder that is new, or empty. It appears complete or not at all.
        to: `"fp8-row"`: compressed-tensors `float-quantized`, scales by row, for recipes `rowwise` and
            `rowwise_hp_wgrad`. `"fp8-block"`: DeepSeek-V3's blocks of 128×128, for `blockwise`. `"mxfp8"`:
            compressed-tensors `mxfp8-quantized`, for `mxfp8`. `"bf16"`: as `save_pretrained`, in the dtype of the
            parameters; weights that are resident in FP8 are dequantized.
        max_shard_size: Largest size of one file, as of `save_pretrained`.
        details: More rows of the model card, such as the base model.

    Returns:
        Names of the modules in FP8, and of the others with the reason.

    Raises:
        ValueError: For an unknown layout, a `path` that holds something, a model without a layer that the layout
            describes, a model whose reader in Transformers has other tensors, a model that is sharded, has adapters or
            no values, and for a weight that holds NaN or infinity.
        OSError: If the folder cannot be written, as on a full disk. Nothing is left of it.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        ...                      num_attention_heads=2)
        >>> model = octavo.convert(LlamaForCausalLM(config).bfloat16(), "rowwise")
        >>> print(octavo.export(model, "exported"))
        written: exported (fp8-row: 7 modules in FP8, 1 in high precision)
    """
    layout = get_layout(to)
    check_shard_size(max_shard_size)
    check_exportable(model)
    out = Path(path).expanduser()
    with new_folder(out) as folder, write_errors(out):
        exported = replace(write(model, folder, layout, max_shard_size), path=out)
        if layout is not None:
            (folder / "README.md").write_text(model_card(model, exported, layout, details or {}), encoding="utf-8")
    for note in exported.notes:
        warnings.warn(f"octavo.export: {note}", UserWarning, stacklevel=2)
    return exported


def check_exportable(model: "PreTrainedModel") -> None:
    """Raise TypeError or ValueError for a model that cannot be exported."""
    with needs_extras("octavo.export"):
        from transformers import PreTrainedModel
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"octavo.export writes models of Transformers; got {type(model).__name__}. Of a wrapped model give the one "
            "inside (model.module); of a PEFT model, model.merge_and_unload()"
        )
    wrappers = (name for name, module in model.named_modules() if type(module).__module__.startswith("peft."))
    if (adapter := next(wrappers, None)) is not None:
        raise ValueError(
            f"this model has adapters of PEFT (first: {adapter!r}), which no layout holds: model.merge_and_unload() of "
            "the PEFT model merges them, after octavo.revert(model) if the base is resident in FP8"
        )
    if hasattr(model.config, "quantization_config"):
        raise ValueError(
            "this model is quantized already (its config has a quantization_config): load it with dequantize=True in "
            "that, and convert it, to export it anew; or, if its weights came from elsewhere, del "
            "model.config.quantization_config"
        )
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name} has no values (it is on the meta device): load the weights first")
        if hasattr(parameter, "placements"):
            how = "save a checkpoint, and export that in one process (octavo export CHECKPOINT OUT)"
            raise ValueError(f"{name} is sharded over ranks: {how}")


SHARD_SIZE = re.compile(r"[1-9]\d*(\.\d+)?\s*([KMGT]I?B)", re.IGNORECASE)


def check_shard_size(size: int | str) -> None:
    """Raise ValueError unless a size is a number of bytes above 0, or as "50GB"."""
    if not (size > 0 if isinstance(size, int) else SHARD_SIZE.fullmatch(size.strip())):
        raise ValueError(f'max_shard_size is a size such as "5GB", "500MB" or "4GiB"; got {size!r}')


def write(model: "PreTrainedModel", folder: Path, layout: ExportLayout | None, max_shard_size: int | str) -> Exported:
    """Write weights and configuration into a folder that is there."""
    rows = {row.name: row.reason for row in report(model) if not row.converted}
    save = type(model).save_pretrained  # that of a model with resident weights raises
    if layout is None:
        with no_progress_bar():
            state = state_dict(model) | {name: _on_cpu(weight) for name, weight in _resident_weights(model).items()}
            save(model, folder, state_dict=state, max_shard_size=max_shard_size)
        return Exported(path=folder, layout="bf16", fp8=(), high_precision=rows, notes=())
    try:
        state = _state_dict(model)
        saved = names_in_checkpoint(model, state)
    except (RuntimeError, ValueError) as error:  # such as weights tied otherwise than the config says
        raise ValueError(f"Transformers cannot save this model, in high precision neither: {error}") from None
    for name, tensor in (saved | _resident_weights(model)).items():
        values = tensor.dequantized(torch.float32) if isinstance(tensor, ResidentWeight) else tensor
        if values.is_floating_point() and values.element_size() > 1 and not torch.isfinite(values).all():
            raise ValueError(f"{name} holds NaN or infinity: nothing was written. Export an earlier checkpoint")
    _check_reader(model, saved, layout)
    quantized: dict[str, ScaledTensor] = {}
    misfits: dict[str, str] = {}
    fp8 = []
    for fqn, module in model.named_modules():
        if is_converted(module) or is_converted_experts(module):
            pieces = _quantized_weights(model, fqn, module, layout, saved)
            if isinstance(pieces, str):
                misfits[fqn] = pieces
                if plain := {f"{fqn}.{name}": _on_cpu(weight) for name, weight in resident_in(module)}:
                    saved |= names_in_checkpoint(model, plain)
            else:
                quantized |= pieces
                fp8.append(fqn)
    if not fp8:
        raise ValueError(_nothing_fits(layout, misfits))
    high_precision = {fqn: (rows | misfits)[fqn] for fqn, _ in model.named_modules() if fqn in rows or fqn in misfits}
    final: dict[str, Tensor] = {}
    for name, tensor in saved.items():
        final[name] = quantized[name].data if name in quantized else tensor
        if name in quantized:
            scale = quantized[name].scale
            assert scale is not None
            stored = scale if scale.dtype == torch.float32 else scale.view(torch.uint8)
            final[f"{name.removesuffix('.weight')}.{layout.scale_name}"] = stored.contiguous()
    with no_progress_bar():
        save(model, folder, state_dict=final, save_original_format=False, max_shard_size=max_shard_size)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = layout.quantization_config(_ignored(model, high_precision))
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    notes = _notes(model, layout, misfits, quantized, fp8)
    return Exported(path=folder, layout=layout.name, fp8=tuple(fp8), high_precision=high_precision, notes=notes)


def _state_dict(model: "PreTrainedModel") -> dict[str, Tensor]:
    """Return what `save_pretrained` writes of a model, before it gives tensors their names in checkpoints."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    state = state_dict(model)
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    return dict(remove_tied_weights_from_state_dict(state, model))


def _check_reader(model: "PreTrainedModel", saved: Mapping[str, Tensor], layout: ExportLayout) -> None:
    """Raise ValueError unless the model that Transformers builds to read the checkpoint has the same tensors."""
    # It is built on the meta device: Transformers replaces experts of some classes if a checkpoint is quantized.
    from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION

    owner, method = original_class(model), layout.quantization_config(())["quant_method"]
    with torch.device("meta"):
        reader = owner(copy.deepcopy(model.config))
        for fqn, module in list(reader.named_modules()):
            patch: Any = MODULES_TO_PATCH_FOR_QUANTIZATION.get(type(module).__name__)
            if patch is not None and method in patch["quantization_methods"]:
                reader.set_submodule(fqn, patch["module_name"](model.config.get_text_config()))
    if "_weight_conversions" in vars(model):  # a loaded model is saved by the names that it was loaded by
        reader._weight_conversions = model._weight_conversions
    expected = names_in_checkpoint(reader, _state_dict(reader))
    problems = {
        "the file would lack": [name for name in expected if name not in saved],
        "nothing would read": [name for name in saved if name not in expected],
        "of another shape are": [n for n, t in expected.items() if n in saved and saved[n].shape != t.shape],
    }
    if found := [f"{what} {len(names)} ({listed(names)})" for what, names in problems.items() if names]:
        raise ValueError(
            f"the {owner.__name__} that Transformers builds to read {layout.name} ({method}) has other tensors than "
            f"this model, and random values instead of them: {'; '.join(found)}. Nothing was written. Export to 'bf16'"
        )


def _nothing_fits(layout: ExportLayout, misfits: Mapping[str, str]) -> str:
    recipes = " or ".join(layout.recipes)
    if not misfits:
        return (
            f"no layer of this model computes in FP8, so {layout.name} would hold none: octavo.convert(model, "
            f"{layout.recipe.name!r}) before training, or export to 'bf16'"
        )
    first, reason = next(iter(misfits.items()))
    others = ", ".join(f"{other.name} for {' and '.join(other.recipes)}" for other in LAYOUTS.values())
    return (
        f"no layer of this model can be written as {layout.name}, which describes recipe {recipes}. {len(misfits)} "
        f"layers compute in FP8 otherwise; the first is {first}: {reason}. Export to the layout of its recipe "
        f"({others}), or to 'bf16'"
    )


def _notes(
    model: "PreTrainedModel", layout: ExportLayout, misfits: Mapping[str, str], quantized: Mapping[str, ScaledTensor],
    fp8: Sequence[str],
) -> tuple[str, ...]:  # fmt: skip
    """Return what a reader of the folder must know, a sentence or two each."""
    notes, modules = [], dict(model.named_modules())
    for reason in dict.fromkeys(misfits.values()):
        names = [fqn for fqn, why in misfits.items() if why == reason]
        notes.append(f"{listed(names)}: FP8 in training, high precision here: {reason}")
    if unrounded := [fqn for fqn in fp8 if modules[fqn].recipe.weight_only]:
        why = f"training did not round their inputs (weight_only); engines of {layout.name} do"
        notes.append(f"{listed(unrounded)}: {why}")
    partial = [name for name, weight in quantized.items() if any(size % 128 for size in weight.data.shape)]
    if layout.name == "fp8-block" and partial:
        notes.append(
            f"{len(partial)} weights have partial blocks (first: {partial[0]} "
            f"{list(quantized[partial[0]].data.shape)}). The layout allows them; Transformers' dequantization on a CPU "
            "reads wrong values or raises an error"
        )
    if layout.name == "mxfp8" and any(is_converted_experts(modules[fqn]) for fqn in fp8):
        notes.append("Transformers 5.23 does not read experts in this layout: it takes their scales for scales by row")
    mixed = []
    for parent, _, own in (fqn.rpartition(".") for fqn in fp8):
        joined = {f"{parent}.{name}" for names in JOINED if own in names for name in names}
        if not joined & modules.keys() <= set(fp8):
            mixed.append(f"{parent}.{own}".lstrip("."))
    if mixed:
        notes.append(
            f"{listed(mixed)}: in FP8, but not the layers that vLLM joins with them (q, k and v; gate and up), which "
            "need one precision"
        )
    return tuple(notes)


def _ignored(model: "PreTrainedModel", high_precision: Mapping[str, str]) -> list[str]:
    """Return the modules that stay in high precision, by their names in the model and in its checkpoints."""
    names = []
    for fqn in high_precision:
        parameters = model.get_submodule(fqn).named_parameters(recurse=False)
        matrices = {f"{fqn}.{name}": getattr(p, "data_", p).detach() for name, p in parameters if p.ndim in (2, 3)}
        saved = names_in_checkpoint(model, matrices) if matrices else {}
        names += [fqn, *(name.removesuffix(".weight") for name in saved if name.endswith(".weight"))]
    return list(dict.fromkeys(names))


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Silence the progress bar of Transformers' loading and saving."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _quantized_weights(
    model: "PreTrainedModel", fqn: str, module: LinearLike | Experts, layout: ExportLayout, saved: Mapping[str, Tensor]
) -> dict[str, ScaledTensor] | str:
    if not layout.fits(module.recipe):
        return f"it computes in recipe {module.recipe.name}, which {layout.name} does not describe"
    if isinstance(module, Experts):
        names, transposed = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"], bool(module.is_transposed)
    else:
        names, transposed = ["weight"], module.weight_is_transposed
    if transposed:
        return f"its weight is stored as [in, out], for which {layout.name} has no place"
    codes: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    for name in names:
        weight = module._parameters.get(name)
        if weight is None:
            return "its weight is not a parameter: it is computed from others"
        tied = [name for name, other in model.named_parameters(remove_duplicate=False) if other is weight]
        if len(tied) > 1:
            return f"its weight is tied ({', '.join(tied)})"
        if weight.shape[-1] % layout.multiple:
            return f"its {weight.shape[-1]} input features are no multiple of {layout.multiple}"
        if isinstance(weight, ResidentWeight):
            if weight.spec != module.recipe.w:
                return f"its weight is resident as {weight.spec}, for which {layout.name} has no place"
            codes[f"{fqn}.{name}"], scales[f"{fqn}.{name}"] = weight.data_.view(torch.uint8), weight.scale
            continue
        matrices = weight.detach().reshape(-1, *weight.shape[-2:])
        parts = [quantize(matrix, module.recipe.w).data.view(torch.uint8) for matrix in matrices]
        codes[f"{fqn}.{name}"] = torch.stack(parts).view(weight.shape)
    pieces = {}
    in_parts = "checkpoints store its weight in parts, and blocks of training's scales belong to two of them"
    scales = names_in_checkpoint(model, scales) if scales else {}
    for name, code in names_in_checkpoint(model, codes).items():
        part = saved.get(name)
        if part is None or part.ndim != 2 or part.shape != code.shape or not name.endswith(".weight"):
            return f"checkpoints of {type(model).__name__} do not store its weight as matrices of its own"
        granularity = module.recipe.w.granularity
        if name not in scales:
            pieces[name] = quantize(part, module.recipe.w)
        elif scales[name].shape != granularity.scale_shape((code.shape[0], code.shape[1])):
            return in_parts
        else:
            pieces[name] = ScaledTensor(part, scales[name], module.recipe.w)
        whole = code.shape[0] in {module.get_parameter(stored).shape[-2] for stored in names}
        splits_blocks = not whole and code.shape[0] % granularity.rows
        if splits_blocks or not torch.equal(pieces[name].data.view(torch.uint8), code):  # False too if shapes differ
            return in_parts
    return pieces


def _resident_weights(model: "PreTrainedModel") -> dict[str, ResidentWeight]:
    """Return the weights that are resident in FP8, by all their names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: weight for name, weight in parameters if isinstance(weight, ResidentWeight)}


def state_dict(model: "PreTrainedModel") -> dict[str, Tensor]:
    """Return the state of a model, with the data of resident weights and without their scales."""
    scales = {name + SCALE_SUFFIX for name in _resident_weights(model)}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in scales}


def _on_cpu(weight: ResidentWeight) -> Tensor:
    return weight.dequantized(weight.dtype).cpu()
