"""The shapes that are measured, as named sets of (M, K, N): tokens, in_features, out_features."""

from argparse import ArgumentTypeError
from collections.abc import Iterable
from itertools import chain
from typing import Any

Shape = tuple[int, int, int]

TOKENS = 16384  # Tokens of a batch, where a shape is a layer's

TARGETS: tuple[Shape, ...] = ((TOKENS, 4096, 14336), (TOKENS, 8192, 28672))
"""The two that the project's targets name; measured first."""

_PROJECTIONS = (
    (4096, 14336), (14336, 4096), (4096, 4096), (4096, 6144), (4096, 11008), (11008, 4096), (5120, 13824),
    (8192, 28672), (8192, 7168), (3584, 8192), (8192, 1280), (1024, 8192),
)  # fmt: skip
_LOSING = (
    (TOKENS, 1024, 1024), (TOKENS, 2048, 2048), (TOKENS, 4096, 128), (1, 4096, 4096), (16, 4096, 4096),
    (128, 4096, 4096), (512, 4096, 4096), (TOKENS, 4096, 8), (TOKENS, 4096, 64), (4096, 4096, 128256),
)  # fmt: skip

SETS: dict[str, tuple[Shape, ...]] = {
    "targets": TARGETS,
    "cubes": tuple((size, size, size) for size in (4096, 8192, 16384, 2048, 1024)),
    "llama": tuple((TOKENS, k, n) for k, n in _PROJECTIONS),
    "losing": _LOSING,
    "tiny": ((48, 64, 32), (17, 19, 5)),
}
"""`llama`: projections of Llama 2 7B/13B, Llama 3 8B/70B and their tensor-parallel shards. `losing`: where FP8 should
lose: narrow layers, few tokens, LoRA ranks, a vocabulary head. `tiny`: what runs without a GPU."""

DESCRIPTION = (
    "named sets, or shapes, separated by spaces. Sets: "
    + "; ".join(f"{name} ({len(shapes)})" for name, shapes in SETS.items())
    + ". A shape is M,K,N: tokens, in_features, out_features."
)


def of(text: str) -> tuple[Shape, ...]:
    """The shapes that a word of a command line names."""
    sizes = text.split(",")
    if text in SETS:
        return SETS[text]
    if len(sizes) != 3 or not all(size.isdigit() for size in sizes):
        raise ArgumentTypeError(f"{text!r} is neither a named set ({', '.join(SETS)}) nor a shape M,K,N")
    return ((int(sizes[0]), int(sizes[1]), int(sizes[2])),)


def each_once(sets: Iterable[Iterable[Shape]]) -> list[Shape]:
    return list(dict.fromkeys(chain.from_iterable(sets)))


def label(shape: Shape) -> str:
    return "×".join(map(str, shape))


def llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, words: int, tokens: int) -> Any:
    """Fields of the configuration of a Llama in Transformers."""
    return {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers, "vocab_size": words,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": tokens,
    }  # fmt: skip
