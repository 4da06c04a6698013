"""Level 3: collectives with FP8 payloads on `torch.distributed`.

checks.py        checks of arguments
encoding.py      the encoding of a matrix in a message: FP8 bytes followed by scales
collectives.py   all_gather, reduce_scatter, all_reduce, all_to_all, all_to_all_single; async, and differentiable
p2p.py           send, recv, isend, irecv
"""

from octavo.comm.collectives import all_gather, all_reduce, all_to_all, all_to_all_single, reduce_scatter
from octavo.comm.encoding import ADAPTIVE_SPEC, DEFAULT_SPEC
from octavo.comm.p2p import irecv, isend, recv, send

__all__ = [
    "ADAPTIVE_SPEC",
    "DEFAULT_SPEC",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "irecv",
    "isend",
    "recv",
    "reduce_scatter",
    "send",
]
