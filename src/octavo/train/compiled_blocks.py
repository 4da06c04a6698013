"""The repeated block of a model: its compilation (`run.compile`, docs/compile.md) and its activation checkpointing.

Each block, with its checkpointing, is one graph (`fullgraph=True`) of static shapes, and equal blocks share it. Only
the `forward` of a block is wrapped: modules, names, hooks and `state_dict` stay as they are.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, update_wrapper, wraps
from typing import Any

import torch
import torch.nn.attention.varlen  # registers its op, named below
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import octavo.kernels  # noqa: F401  registers the ops named below
from octavo._version import __version__
from octavo.nn.equalized import compiled_pass, equalized_layers, equalizer_of
from octavo.nn.memory_audit import Audit, SavedStorage
from octavo.runtime import torch_compat
from octavo.runtime.blocks import find_blocks
from octavo.runtime.stopwatch import timed
from octavo.runtime.switch import disabled
from octavo.runtime.torch_compat import TorchDispatchMode, run_eagerly, tree_leaves
from octavo.train.config.run_config import ConfigError

BACKEND = "inductor"
REMEDY = 'set run.compile = "none"'
GRAPHS_PER_BLOCK = 32  # Most graphs for each block: the autopilot may change its recipes, and evaluation has its own
_SECONDS = {"compile": 0.0}  # Time that this process has spent compiling


@contextmanager
def _measured(stage: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        with timed(stage), warnings.catch_warnings():
            # torch 2.13: Dynamo asks each input whether it has a gradient.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
            yield
    finally:
        _SECONDS[stage] += time.perf_counter() - start


class CompiledBlocks:
    def __init__(self, model: nn.Module, mode: str, device: torch.device, problem: str = "") -> None:
        self._model, self._required = model, mode == "blocks"
        self._forward: Callable[..., Any] | None = None
        compiles = self._required or (mode == "auto" and device.type == "cuda")
        self._blocks = find_blocks(model) if compiles else []
        self.reason = ""  # Why the blocks run eagerly although they should compile; else empty
        if compiles:
            self.reason = problem if self._blocks else f"{type(model).__name__} has no list of equal blocks"
        if self.reason and self._required:
            raise ConfigError(f'run.compile = "blocks": {self.reason}: {REMEDY}')
        self._reported = 0, self.reason, _SECONDS["compile"]

    @property
    def active(self) -> bool:
        return bool(self._blocks) and not self.reason

    def trial(self) -> AbstractContextManager[None]:
        """Run the trial batch inside; eagerly if recipes with channel scales would measure it."""
        return run_eagerly() if self.active and any(equalized_layers(self._model)) else nullcontext()

    def one_pass(self) -> AbstractContextManager[None]:
        """Run one forward and backward inside; eagerly if recipes with channel scales measure them."""
        return compiled_pass(self._model) if self.active else nullcontext()

    def compile(self) -> None:
        """Replace the forwards of the blocks, which compile when they are called."""
        if not self.active:
            return
        torch_compat.allow_shared_graphs(GRAPHS_PER_BLOCK * (len(self._blocks) + 1))
        torch_compat.measure_compilations(_measured)
        # Or PyTorch's cache on disk returns graphs that another version of Octavo traced.
        torch.compiler.config.cache_key_tag = torch.compiler.config.cache_key_tag or f"octavo {__version__}"
        for _, layer in equalized_layers(self._model):
            equalizer_of(layer)
        for block in self._blocks:
            block.forward = self._compiled(block, block.forward)
        self._reported = self.graphs, "", _SECONDS["compile"]

    def _compiled(self, block: nn.Module, inner: Callable[..., Any]) -> Callable[..., Any]:
        errors = torch_compat.compilation_error()

        # The frame that Dynamo compiles: it skips that of `torch.utils.checkpoint`.
        def forward(*args: object, **kwargs: object) -> object:
            return inner(*args, **kwargs)

        self._forward = forward
        compiled = torch.compile(forward, fullgraph=True, dynamic=False, backend=BACKEND)

        @wraps(inner)
        def compiled_forward(*args: object, **kwargs: object) -> object:
            if self.reason:
                return inner(*args, **kwargs)
            try:
                return compiled(*args, **kwargs)
            except errors as error:
                # The first line of an error of Dynamo, and the line of code that it is about.
                name, problem = type(block).__name__, " ".join(str(error).strip().split("\n", 1)[0].split())
                if frames := getattr(error, "real_stack", None):
                    problem += f" ({frames[-1].filename}:{frames[-1].lineno}, {frames[-1].line})"
            if not self._required or self.graphs:
                self.reason = f"{name} does not compile: {problem}"
                return inner(*args, **kwargs)
            try:
                with disabled():
                    compiled(*args, **kwargs)
            except errors:
                self.reason = f"{name} does not compile, unconverted either: {problem}"
                return inner(*args, **kwargs)
            raise ConfigError(f"{name} compiles unconverted, but not converted: {problem}. Without compilation the run "
                              f"is slower: {REMEDY}")  # fmt: skip

        return compiled_forward

    @property
    def graphs(self) -> int:
        """Number of compiled graphs, with those of earlier models of this process."""
        return 0 if self._forward is None else torch_compat.compiled_graphs(self._forward)

    def note(self) -> str:
        """What compiles, in a sentence; empty where compilation is off."""
        if self.reason:
            return f"blocks run eagerly, not compiled: {self.reason}"
        return f"{len(self._blocks)} blocks compile, each one graph without a break" if self._blocks else ""

    def check(self) -> None:
        """Raise ConfigError if no block has been compiled in a first step that does not measure channel scales."""
        if self.active and not self.graphs and not any(equalized_layers(self._model)):
            raise ConfigError(f"no block was compiled in the first step: {REMEDY}")

    def news(self) -> str:
        """What has changed since the last call, in a sentence; empty without changes."""
        (graphs, reason, seconds), now = self._reported, (self.graphs, self.reason, _SECONDS["compile"])
        self._reported = now
        if self.reason != reason:
            return self.note()
        return f"graphs of blocks compiled: {now[0] - graphs}, in {now[2] - seconds:.1f} s" if now[0] > graphs else ""


aten = torch.ops.aten
SAVED_OPS = [
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._scaled_mm.default,
    aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default, torch.ops.octavo.scaled_mm.default,
]  # fmt: skip
"""Ops whose outputs "selective" keeps: costly to compute, cheap to hold."""


class Checkpointing:
    """Activation checkpointing applied to `model` ("none", "full" or "selective"); `in_graphs` where blocks compile."""

    # Raises ConfigError for a model without a repeated block.

    def __init__(self, model: nn.Module, mode: str, *, in_graphs: bool = False) -> None:
        self._saved: SavedOutputs | None = None  # In `saved_outputs`
        if mode == "none":
            return
        names = {id(module): name for name, module in model.named_modules()}
        if not (blocks := find_blocks(model)):
            problem = f"precision.checkpointing: {type(model).__name__} has no list of equal blocks to recompute"
            raise ConfigError(f'{problem}; take "none"')
        for block in blocks:
            # A graph saves what its partitioner decides, where saved-tensor hooks see it.
            in_graph = partial(create_selective_checkpoint_contexts, SAVED_OPS)
            contexts = in_graph if in_graphs else partial(self._contexts, names[id(block)])
            context: dict[str, Any] = {} if mode == "full" else {"context_fn": contexts}
            recomputed = partial(checkpoint, block.forward, use_reentrant=False, **context)
            block.forward = update_wrapper(recomputed, block.forward, updated=())  # its signature

    @contextmanager
    def saved_outputs(self) -> Iterator[Audit]:
        """What "selective" keeps of forwards inside, by block: it holds that itself, unseen by saved-tensor hooks."""
        self._saved, rows = {}, list[SavedStorage]()
        try:
            yield Audit(rows=rows)
        finally:
            rows += [row for _, row in self._saved.values()]
            self._saved = None

    def _contexts(self, block: str) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        caching, cached = create_selective_checkpoint_contexts(SAVED_OPS)
        return (caching if self._saved is None else _Recorder(caching, self._saved, block)), cached


SavedOutputs = dict[int, tuple[torch.UntypedStorage, SavedStorage]]  # By the address, which stays a storage's own


class _Recorder(TorchDispatchMode):
    def __init__(self, caching: AbstractContextManager[Any], saved: SavedOutputs, block: str) -> None:
        TorchDispatchMode.__init__(self)
        self._caching, self._saved, self._block = caching, saved, block

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        with self._caching:
            outputs = func(*args, **(kwargs or {}))
        for output in tree_leaves(outputs) if func in SAVED_OPS else ():
            if isinstance(output, torch.Tensor):
                storage, shape = output.untyped_storage(), tuple(output.shape)
                row = SavedStorage(bytes=storage.nbytes(), dtype=output.dtype, shape=shape, owner=self._block)
                self._saved.setdefault(storage._cdata, (storage, row))
        return outputs
