"""Linears whose weight is a DTensor: tensor and sequence parallelism by PyTorch's styles and by Transformers' plans.

    W [N,K]        X [..., K]                      Y [..., N]            gradients
    Shard(0)       Replicate                       Shard(-1)             ∂X Partial
    Shard(1)       Shard(-1)                       Partial()             ∂b on each rank, b in one of the summands
    Replicate      Replicate, or Shard of tokens   as X                  ∂W, ∂b Partial where X is sharded

Each rank multiplies its part as `octavo.nn.linear` does, so scales cover what a rank has: whole rows of X and W with
Shard(0), where Y and ∂W are those of one process bit for bit, and parts of rows with Shard(1). X is redistributed as
the table wants, in its own dtype; an X or b that is no DTensor counts as Replicate. On a mesh of several dimensions
each dimension follows the table by itself.
"""

from collections.abc import Callable

from torch import Size, Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from octavo.numerics.recipe import Recipe
from octavo.numerics.spec import TENSOR
from octavo.tensor import contiguous_strides


def distributed_linear(
    local_linear: Callable[..., Tensor], input: Tensor, weight: DTensor, bias: Tensor | None, recipe: Recipe
) -> Tensor:
    """Return `local_linear(X, W, b)` of each rank's parts, as a DTensor."""
    mesh, placements = weight.device_mesh, weight.placements
    check_recipe(recipe)
    whole = [Replicate()] * mesh.ndim
    x, b = (
        other
        if other is None or isinstance(other, DTensor)
        else DTensor.from_local(other, mesh, whole, run_check=False)
        for other in (input, bias)
    )
    assert x is not None
    for name, other in (("input", x), ("bias", b)):
        if other is not None and other.device_mesh != mesh:
            raise ValueError(f"linear: weight is on {mesh}, but {name} on {other.device_mesh}: give both one mesh")
    last, first = x.ndim - 1, 1
    rows: list[tuple[Placement, ...]] = []  # of each mesh dimension: X, ∂X, ∂W, ∂b and Y
    for dim, (w, x_place) in enumerate(zip(placements, x.placements, strict=True)):
        if w == Shard(0):
            rows.append((Replicate(), Partial(), w, Shard(0), Shard(last)))
        elif w == Shard(1):
            rows.append((Shard(last), Shard(last), w, Partial(), Partial()))
            first *= int(mesh.get_local_rank(dim) == 0)
        elif w.is_replicate():
            tokens = isinstance(x_place, Shard) and x_place.dim != last
            same, summed = (x_place, Partial()) if tokens else (Replicate(), w)
            rows.append((same, same, summed, summed, same))
        else:
            raise ValueError(
                f"linear: a weight [N,K] is placed as Shard(0), Shard(1) or Replicate() on each dimension of its mesh; "
                f"got {placements}: redistribute it"
            )
    x_in, x_grad, w_grad, b_grad, y_out = map(list, zip(*rows, strict=True))
    if list(x.placements) != x_in:  # if equal, the backward of `redistribute` would sum a Partial ∂X on every rank
        x = x.redistribute(placements=x_in)
    x_local = x.to_local(grad_placements=x_grad)
    b_local = None
    if b is not None:
        b_local = b.redistribute(
            placements=[p if p.is_shard() else Replicate() for p in b_grad]
        ).to_local(grad_placements=b_grad)  # fmt: skip
    if b_local is not None and any(w == Shard(1) for w in placements):
        b_local = b_local * first
    y_local = local_linear(x_local, weight.to_local(grad_placements=w_grad), b_local)
    shape = Size((*x.shape[:-1], weight.shape[0]))
    return DTensor.from_local(y_local, mesh, y_out, run_check=False, shape=shape, stride=contiguous_strides(shape))


def check_recipe(recipe: Recipe) -> None:
    """Raise ValueError for a recipe whose scales cover more than a rank has."""
    if has_tensor_scale(recipe):
        raise ValueError(
            f"recipe {recipe.name!r} has one scale per tensor, which would be another on each rank of tensor "
            "parallelism: convert the model with recipe 'rowwise', whose scales belong to rows"
        )


def has_tensor_scale(recipe: Recipe) -> bool:
    """Return whether scales of X or W cover more than a rank has."""
    return TENSOR in (recipe.x.granularity, recipe.w.granularity)


def tensor_scale_problem(recipe: Recipe) -> str:
    """Return why a recipe with a scale per tensor cannot be in a pipeline, and what to use."""
    return (
        f"recipe {recipe.name!r}, whose scales per tensor would depend on how a batch is cut into micro-batches: "
        "convert the model with recipe 'rowwise', whose scales belong to rows"
    )
