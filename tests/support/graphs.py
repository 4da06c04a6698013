"""Graphs that torch.compile makes of a function."""

import torch


def compiled(function):
    """A list for the graphs of forward and backward, as Inductor would get them, and the compiled function."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def collect(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph)

    torch._dynamo.reset()
    # Its partitioner merges common subexpressions first.
    backend = aot_autograd(fw_compiler=collect, bw_compiler=collect, partition_fn=min_cut_rematerialization_partition)
    return graphs, torch.compile(function, fullgraph=True, backend=backend)
