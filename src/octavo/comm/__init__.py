"""Level 3: collectives whose payload is FP8, on `torch.distributed`.

wire.py          what a matrix looks like in a message: FP8 bytes, and its scales behind them
collectives.py   all_gather, reduce_scatter, all_reduce, all_to_all, all_to_all_single; async, and differentiable
p2p.py           send, recv, isend, irecv
"""

from octavo.comm.collectives import all_gather, all_reduce, all_to_all, all_to_all_single, reduce_scatter
from octavo.comm.p2p import irecv, isend, recv, send
from octavo.comm.wire import WIRE

__all__ = [
    "WIRE",
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
