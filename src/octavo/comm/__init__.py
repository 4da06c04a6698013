"""Level 3: collectives with FP8 payloads on `torch.distributed`."""

from octavo.comm.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_single,
    irecv,
    isend,
    recv,
    reduce_scatter,
    send,
)
from octavo.comm.encoding import ADAPTIVE_SPEC, DEFAULT_SPEC

__all__ = [
    "ADAPTIVE_SPEC", "DEFAULT_SPEC", "all_gather", "all_reduce", "all_to_all", "all_to_all_single", "irecv", "isend",
    "recv", "reduce_scatter", "send",
]  # fmt: skip
