"""Share one copy of a model per machine among its ranks.

One process of each machine builds the model and writes its tensors to a file in a folder that only its user may enter.
All ranks map the file, and each reads only its own rows. The file is unlinked before training begins. The rest (the
modules) travels over the process group. The file holds only tensors and is read with `weights_only`, so a planted file
cannot run code.
"""

import io
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from octavo.train.config.run_config import ConfigError
from octavo.train.ranks import Ranks

T = TypeVar("T")


def share_on_machine(make: Callable[[], T], ranks: Ranks) -> T:
    """Call `make` on one rank of each machine and return its result on every rank."""
    # Raises ConfigError on all ranks if `make` raises it, or TMPDIR has no room for the tensors.
    if ranks.world_size == 1:
        return make()
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder:  # of mode 0700
        file = Path(folder) / "tensors.pt"
        skeleton = ranks.raise_together(lambda: _write(make(), file) if ranks.local == 0 else b"")
        owner = ranks.rank - ranks.local
        pickled, path = ranks.all_gather((skeleton, str(file)))[owner]
        value: T = ranks.raise_together(lambda: _TensorJoiner(pickled, _mapped(Path(path))).load())
        ranks.wait()  # until all have mapped it
    return value


def _write(value: Any, file: Path) -> bytes:
    """Write the tensors of a value. Returns the rest, pickled."""
    buffer = io.BytesIO()
    separator = _TensorSeparator(buffer)
    separator.dump(value)
    try:
        torch.save(separator.tensors, file)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"the model cannot be written to {file} for the processes of this machine to share ({error}): set TMPDIR "
            "to a folder with room for it"
        ) from None
    return buffer.getvalue()


def _mapped(file: Path) -> dict[str, Tensor]:
    if os.name == "posix" and (file.stat().st_uid, file.parent.stat().st_mode & 0o077) != (os.getuid(), 0):
        raise ConfigError(f"{file} is not this user's alone: set TMPDIR to a folder of your own")
    try:
        tensors: dict[str, Tensor] = torch.load(file, mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise ConfigError(f"{file} does not hold the tensors that were written to it: {error}") from None
    return tensors


class _TensorSeparator(pickle.Pickler):
    """Pickles everything but tensors, which it collects."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}

    def persistent_id(self, value: Any) -> tuple[str, bool, bool] | None:
        if not isinstance(value, Tensor):
            return None
        name = self._names.setdefault(id(value), str(len(self._names)))
        self.tensors[name] = value.detach()
        return name, isinstance(value, nn.Parameter), value.requires_grad


class _TensorJoiner(pickle.Unpickler):
    """Read what `_TensorSeparator` wrote, with the tensors in their places."""

    def __init__(self, pickled: bytes, tensors: dict[str, Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors
        self._restored: dict[str, Tensor] = {}

    def persistent_load(self, key: tuple[str, bool, bool]) -> Tensor:
        name, is_parameter, requires_grad = key
        if name not in self._restored:
            tensor = self._tensors[name]
            restored = nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)
            self._restored[name] = restored
        return self._restored[name]
