"""Sharded state of a run, one file per rank, readable by any number of ranks: `torch.distributed.checkpoint`.

    checkpoints/step-000123/shards/
        __0_0.distcp  __1_0.distcp …    each rank's rows of parameters ("model.…") and states ("optimizer.…")
        .metadata                       the index of the rows, a pickle, which torch would let call any function

The state of a run of one process is a file of weights and one of optimizer states (`save_whole`, `load_whole`).
"""

import io
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.fsdp import FSDPModule

from octavo.optim.sharded import local_rows
from octavo.runtime.blocks import Absent
from octavo.runtime.torch_compat import StorageInfo, is_dtensor
from octavo.serving.folder import apply_umask
from octavo.serving.writer import no_progress_bar
from octavo.tensor import local_tensor
from octavo.train import lora
from octavo.train.checkpoint.digests import digests_of
from octavo.train.config.run_config import ConfigError
from octavo.train.optimizer import TrainerOptimizer

SHARDS = "shards"


def state_of(model: nn.Module, optimizer: TrainerOptimizer) -> dict[str, Tensor]:
    """Parameters, buffers and optimizer states by name, without copies; shards as DTensors."""
    state = {f"model.{name}": value for name, value in lora.checkpointed(model).items()}
    return state | {f"optimizer.{name}": value.detach() for name, value in optimizer.tensors().items()}


def has_shards(model: nn.Module) -> bool:
    """Whether this rank has a part of a model: shards, even if they are gathered at the moment, or some layers."""
    parts = any(isinstance(module, FSDPModule | Absent) for module in model.modules())
    return parts or any(is_dtensor(parameter) for parameter in model.parameters())


def write(folder: Path, state: dict[str, Tensor]) -> dict[str, str]:
    """Write this rank's part of a state and wait for the others. Returns the digests of its files, by their path."""
    with _dcp(folder):
        save(state, storage_writer=FileSystemWriter(folder, sync_files=True), no_dist=not dist.is_initialized())
    return _own_digests(folder)


def write_async(folder: Path, state: dict[str, Tensor], group: dist.ProcessGroup) -> Future[dict[str, str]]:
    """Copy a state to host memory and write it in the background; `wait_for` returns the digests."""
    with _dcp(folder):
        writer = FileSystemWriter(folder, sync_files=True)
        written: Any = async_save(state, storage_writer=writer, process_group=group)
    background = ThreadPoolExecutor(1)
    digests = background.submit(lambda: (written.result(), _own_digests(folder))[1])
    background.shutdown(wait=False)
    return digests


def wait_for(future: Future[dict[str, str]], folder: Path) -> dict[str, str]:
    with _dcp(folder):
        return future.result()


def _own_digests(folder: Path) -> dict[str, str]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return digests_of(folder.parent, [f"{SHARDS}/{path.name}" for path in folder.glob(f"__{rank}_*")])


def read(folder: Path, model: nn.Module, optimizer: TrainerOptimizer) -> None:
    """Load a state in place, each rank its rows. Raises ConfigError on all ranks if it does not fit."""
    state = state_of(model, optimizer)
    fill(folder, state, alone=not dist.is_initialized())
    # Already in place; this notifies the model of new weights.
    weights = {name: state[f"model.{name}"] for name in lora.checkpointed(model)}
    model.load_state_dict(weights, strict=not lora.has_adapters(model))


def read_tensors(folder: Path, prefix: str, suffix: str = "") -> dict[str, Tensor]:
    """Read whole the tensors of a state with names of this prefix and suffix, by the rest of their names."""
    saved: Mapping[str, Any] = read_index(folder).state_dict_metadata
    names = [name for name in saved if name.startswith(prefix) and name.endswith(suffix)]
    state = {name: torch.empty(saved[name].size, dtype=saved[name].properties.dtype, device="cpu") for name in names}
    if state:
        fill(folder, state)
    return {name.removeprefix(prefix).removesuffix(suffix): value for name, value in state.items()}


def files_of_index(folder: Path) -> set[str]:
    return {stored.relative_path for stored in read_index(folder).storage_data.values()}


def fill(folder: Path, state: dict[str, Tensor], *, alone: bool = True) -> None:
    """Fill a state in place, in one process or, unless `alone`, in all. Raises ConfigError if it does not fit."""
    with _dcp():
        load(state, storage_reader=ShardReader(folder), no_dist=alone)


@contextmanager
def _dcp(written: Path | None = None) -> Iterator[None]:
    """Run a part of DCP without its warnings; any failure to write becomes an OSError, one to read a ConfigError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", UserWarning)
            yield
    except CheckpointException as error:  # that of a lost rank is none
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        reason = f"rank {rank}: {' '.join(str(cause).split())[:1000]}"
        if written is None:
            raise ConfigError(reason) from None
        # For a full disk, torch.save raises a RuntimeError.
        raise OSError(f"{written} cannot be written: {reason}{free_space(written)}") from None


def free_space(folder: Path) -> str:
    for place in (folder, *folder.parents):
        with suppress(OSError):  # the first rank may have removed it already
            return f" ({shutil.disk_usage(place).free / 2**30:.1f} GiB are free there)"
    return ""


INDEX = ".metadata"


class ShardReader(FileSystemReader):
    """Read shards with the checked index, and only files next to it."""

    def read_metadata(self, *_: object, **__: object) -> metadata.Metadata:
        return read_index(Path(self.path))


def read_index(folder: Path) -> metadata.Metadata:
    """Read and check the index of the shards in `folder`. Raises ConfigError as `ShardReader`."""
    try:
        index: object = _Unpickler(io.BytesIO((folder / INDEX).read_bytes())).load()
        if not isinstance(index, metadata.Metadata):
            raise TypeError
        for name, entry in index.state_dict_metadata.items():
            if not isinstance(entry, metadata.TensorStorageMetadata):
                raise ConfigError(f"{name} is no tensor, and whatever else it is would be unpickled")
            if not isinstance(entry.size, torch.Size) or not isinstance(entry.properties.dtype, torch.dtype):
                raise TypeError
        places = {
            metadata.MetadataIndex(key.fqn, key.offset, key.index): _checked(info)
            for key, info in index.storage_data.items()
        }
        index = metadata.Metadata(index.state_dict_metadata, index.planner_data, places, metadata.StorageMeta())
    except ConfigError as error:
        raise ConfigError(f"{folder / INDEX} is not loaded: {error}") from None
    except Exception as error:  # no common type: unpickling raises many
        raise ConfigError(f"{INDEX} cannot be read ({type(error).__name__})") from None
    return index


def _checked(info: StorageInfo) -> StorageInfo:
    """Where a part of a tensor is, if that is a file beside the index, as it was written."""
    file, numbers = info.relative_path, (info.offset, info.length)
    # Of `str` and `int` themselves: classes of a pickle may compare in their own way.
    if type(file) is not str or Path(file).name != file or "\\" in file or file.startswith("."):
        raise ConfigError(f"it points to {str(file)!r}, which is no file beside it")
    if getattr(info, "transform_descriptors", None):
        raise ConfigError(f"the content of {file} is transformed, which Octavo's is not")
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ConfigError(f"it points to {numbers} in {file}")
    return StorageInfo(file, *numbers)


class _Properties(metadata.TensorProperties):
    def __setstate__(self, state: tuple[torch.dtype]) -> None:
        self.dtype = state[0]


_RECORDS = ("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "StorageMeta")
_CLASSES: dict[str, type] = {  # By names in an index, besides those of torch; they call nothing
    **{name: getattr(metadata, name) for name in _RECORDS}, "TensorProperties": _Properties,
    "_MEM_FORMAT_ENCODING": int, "_StorageInfo": StorageInfo, "_get_layout": str,
    "PosixPath": PurePosixPath, "WindowsPath": PurePosixPath,
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Reads an index into classes made for it alone: a pickle can set attributes of the classes that it names."""

    def find_class(self, module: str, name: str) -> object:
        if kind := _CLASSES.get(name):
            return type(name, (kind,), {})
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype) or value is torch.Size:
            return value
        problem = f"it names {module}.{name}, which no index of tensors needs"
        raise ConfigError(f"{problem}, and which reading it as torch does would call. Use checkpoints that you trust")


def save_whole(folder: Path, model: Any, optimizer: TrainerOptimizer) -> None:
    """Write weights, or adapters alone, and optimizer states. Raises OSError if the disk is full."""
    try:
        if lora.has_adapters(model):
            lora.save(lora.checkpointed(model), folder)
        else:
            with no_progress_bar():
                model.save_pretrained(folder)
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    except (RuntimeError, SafetensorError) as error:  # these two raise it for a full disk
        # torch reports the position in its archive and its own source, and safetensors its error's name.
        reason = "" if "inline_container" in str(error) else f": {' '.join(str(error).split())}"
        raise OSError(f"a file of it is cut off{reason}{free_space(folder)}") from None
    apply_umask(folder)


def load_whole(folder: Path, weights: dict[str, Tensor], model: nn.Module, optimizer: TrainerOptimizer) -> None:
    """Load a checkpoint of one process: all of it, or this rank's rows. Raises ConfigError if it does not fit."""
    try:
        if has_shards(model):
            state = lora.checkpointed(model)
            for name, value in state.items():
                local_tensor(value).copy_(local_rows(value, weights[name]))
            # already in place; this notifies the model of new weights
            model.load_state_dict(state, strict=not lora.has_adapters(model))
            device = "cpu"
        else:
            device = str(next(model.parameters()).device)
            model.load_state_dict(weights, strict=not lora.has_adapters(model))
        states = torch.load(folder / "optimizer.pt", map_location=device, weights_only=True, mmap=True)
        if not isinstance(states, dict):
            raise TypeError(f"optimizer.pt holds a {type(states).__name__}")
        optimizer.load_state_dict(states)
    except Exception as error:  # no common type: damage raises any of them
        raise ConfigError(" ".join(str(error).split()) or type(error).__name__) from None
