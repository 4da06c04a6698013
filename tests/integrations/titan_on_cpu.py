"""Lets torchtitan's Trainer run on a CPU, which is not among its devices: import this before torchtitan.

torchtitan 0.3 also calls a function after the first step that torch 2.13 lacks: `torch.distributed.set_timeout`.
"""

from types import SimpleNamespace

import torch
import torchtitan.tools.utils as utils


class Cpu:
    """What torchtitan asks of a device."""

    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    get_device_name = staticmethod(lambda *_: "cpu")
    get_device_properties = staticmethod(lambda *_: SimpleNamespace(total_memory=2**34))
    memory_stats = staticmethod(lambda *_: {})
    empty_cache = reset_peak_memory_stats = set_device = synchronize = staticmethod(lambda *_: None)


utils.device_type, utils.device_module = "cpu", Cpu()
utils.get_local_device = lambda: torch.device("cpu")

import torchtitan.distributed.utils as dist_utils  # noqa: E402

if not hasattr(torch.distributed, "set_timeout"):
    dist_utils.set_pg_timeouts = lambda *_, **__: None
