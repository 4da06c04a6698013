"""Processes that talk over Gloo: kept between tests, killed where a test leaves them hanging.

    def job(x):                       # at the top of a test's module
        return octavo.comm.all_gather(x * dist.get_rank())

    results = gloo.run(job, 4, x)     # [what rank 0 returned, rank 1, …]

    @on_ranks(2)                      # a test whose assertions are made on the ranks; or "world", its parameter
    def test_norms(recipe):

Each run is a process group of its own. What a rank raises is shown with its traceback; a run that takes too long fails
and takes its processes with it.
"""

import importlib
import inspect
import warnings
from datetime import timedelta
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from benchmarks.processes import Processes
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

_JOBS = 16
"""What a process does before another takes its place: groups that are gone may leave threads of Gloo's, which poll."""


_PRELOADED = [
    "octavo.parallel.pipeline", "torch.distributed.fsdp", "processes", "octavo.train.loop",
    "transformers.models.llama.modeling_llama", "torch.utils.tensorboard", "pyarrow",
]  # fmt: skip
"""Modules that the processes share, which take seconds to import. Those that are absent are left out."""


class Failed(AssertionError):
    """What ranks raised, or that they did not come back."""


class Gloo:
    """A pool of processes."""

    def __init__(self):
        self._processes = Processes("forkserver", _PRELOADED)
        self._jobs = 0

    def run(self, function, world, *args, timeout=90.0, **options):
        """Call a function of a module in `world` processes that are ranks of one group; their results, by rank."""
        self._jobs += 1
        if self._jobs % _JOBS == 0:
            self._processes.kill()
        store = f"{self._processes.folder}/store-{self._jobs}"
        job = partial(function, *args, **options)
        self._processes.send([partial(_call, job, rank, world, store, timeout) for rank in range(world)])
        results, errors = self._processes.collect(timeout)
        if errors:
            raise Failed("\n".join(f"rank {rank}: {text}" for rank, text in sorted(errors.items())))
        return [results[rank] for rank in range(world)]


@cache
def _pool():
    return Gloo()


@pytest.fixture(scope="session")
def gloo():
    return _pool()


def on_ranks(world, **options):
    """Make a test of what each of `world` ranks does: `@on_ranks(2)` above `def test_…(recipe, tmp_path):`.

    `world` may be the name of an argument.
    """

    def decorate(body):
        def test(gloo, **arguments):
            count = arguments[world] if isinstance(world, str) else world
            gloo.run(partial(_body_of, body.__module__, body.__name__), count, arguments, **options)

        own = inspect.signature(body).parameters.values()
        fixture = inspect.Parameter("gloo", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([fixture, *own])
        test.__name__, test.__qualname__, test.__doc__ = body.__name__, body.__name__, body.__doc__
        test.__module__, test.body = body.__module__, body
        return test

    return decorate


def _body_of(module, name, arguments):
    """Call the body of a test, which pickle does not find by its name."""
    return getattr(importlib.import_module(module), name).body(**arguments)


def _call(function, rank, world, store, timeout):
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    torch.manual_seed(0)
    try:
        dist.barrier()  # a rank that is done at once must not leave while others still connect to it
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return function()
    finally:
        _clear_sharding_prop_cache()  # it would hand meshes of this world, whose groups are gone, to the next one
        dist.destroy_process_group()
