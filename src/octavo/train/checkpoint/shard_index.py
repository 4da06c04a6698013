"""Safe reader of the index of a sharded state (`shards/.metadata`).

torch writes the index as a pickle and reads it with `pickle.load`, which calls any function that the file names. This
module reads the file once and turns a short list of allowed names into inert records. It builds the index for torch
from these records and checks each value:

    tensors    dtype, sizes and chunks; an entry of bytes is a pickle as well and raises an error
    files      a name in the folder of the index, no path out of it; no transformed content
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from octavo.runtime.torch_compat import StorageInfo
from octavo.train.config.run_config import ConfigError

INDEX = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
_NAMES = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata")),
    *((_METADATA, name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}
"""Names in an index of tensors, besides `torch.Size` and dtypes."""


class ShardReader(FileSystemReader):
    """Read shards with the checked index, and only files next to it."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the checked index."""
        return read_index(Path(self.path))


def read_index(folder: Path) -> Metadata:
    """Read and check the index of the shards in `folder`. Raises ConfigError as `ShardReader`."""
    try:
        index = _metadata(_Unpickler(io.BytesIO((folder / INDEX).read_bytes())).load())
    except ConfigError as error:
        raise ConfigError(f"{folder / INDEX} is not loaded: {error}") from None
    except Exception as error:  # no common type: unpickling raises many
        raise ConfigError(f"{INDEX} cannot be read ({type(error).__name__})") from None
    for info in index.storage_data.values():
        place = folder / info.relative_path
        if place.exists() and place.resolve().parent != folder.resolve():
            raise ConfigError(f"{place} is not loaded: it is a link out of its folder")
    return index


class _Sealed(type):
    """A class whose attributes a pickle cannot set."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"a pickle may not set {name} of a class")


class _Record(metaclass=_Sealed):
    """Arguments and state of an object in a pickle. Nothing is called."""

    def __new__(cls, *args: Any) -> "_Record":
        return super().__new__(cls)

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


_RECORDS: dict[tuple[str, str], Any] = {(module, name): _Sealed(name, (_Record,), {}) for module, name in _NAMES}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if kind := _RECORDS.get((module, name)):
            return kind
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype) or value is torch.Size:
            return value
        raise ConfigError(
            f"it names {module}.{name}, which no index of tensors needs, and which reading it as torch does would "
            "call. Use checkpoints that you trust"
        )


def _metadata(record: Any) -> Metadata:
    state = _state(record, "Metadata")
    return Metadata(
        {
            _expect(name, str): _tensor(name, entry)
            for name, entry in _expect(state["state_dict_metadata"], dict).items()
        },
        planner_data={_expect(k, str): _path(v) for k, v in _expect(state.get("planner_data") or {}, dict).items()},
        storage_data=dict(_stored(key, value) for key, value in _expect(state["storage_data"], dict).items()),
        storage_meta=StorageMeta(),
        version=_expect(state.get("version"), str | None),
    )


def _tensor(name: str, record: Any) -> TensorStorageMetadata:
    if not isinstance(record, _Record) or type(record).__name__ != "TensorStorageMetadata":
        raise ConfigError(f"{name} is no tensor, and whatever else it is would be unpickled")
    state = _state(record, "TensorStorageMetadata")
    dtype, *_ = _state(state["properties"], "TensorProperties", tuple)
    chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in _expect(state["chunks"], list)]
    return TensorStorageMetadata(
        TensorProperties(dtype=_expect(dtype, torch.dtype)),
        _expect(state["size"], torch.Size),
        [ChunkStorageMetadata(_expect(c["offsets"], torch.Size), _expect(c["sizes"], torch.Size)) for c in chunks],
    )


def _stored(key: Any, value: Any) -> tuple[MetadataIndex, StorageInfo]:
    key_state, info = _state(key, "MetadataIndex"), _state(value, "_StorageInfo")
    file = _expect(info["relative_path"], str)
    if Path(file).name != file or "\\" in file or file.startswith("."):
        raise ConfigError(f"it points to {file!r}, which is no file beside it")
    if info.get("transform_descriptors"):
        raise ConfigError(f"the content of {file} is transformed, which Octavo's is not")
    offset, length = (_expect(info[name], int) for name in ("offset", "length"))
    if offset < 0 or length < 0:
        raise ConfigError(f"it points to {offset}, {length} in {file}")
    start, hint = _expect(key_state.get("offset"), torch.Size | None), _expect(key_state.get("index"), int | None)
    return MetadataIndex(_expect(key_state["fqn"], str), start, hint), StorageInfo(file, offset, length)


def _path(value: Any) -> tuple[str | int, ...]:
    return tuple(_expect(part, str | int) for part in _expect(value, tuple))


def _state(record: Any, name: str, kind: Any = dict) -> Any:
    if not isinstance(record, _Record) or type(record).__name__ != name:
        raise TypeError(f"{name} expected")
    return _expect(record.state, kind)


def _expect(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind}, got {type(value)}")
    return value
