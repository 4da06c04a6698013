"""Collectives with FP8 payloads: quantize, exchange bytes, dequantize; sums in float32, in rank order.

Under autograd the gradient travels back in FP8 too. If the calls of ranks do not fit, Gloo ends a process, or bytes are
read in another format; with `TORCH_DISTRIBUTED_DEBUG=DETAIL` all ranks raise.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.comm import encoding
from octavo.comm.checks import Group, check_args, compare_calls, needs_grad, split_sizes, world_size
from octavo.comm.encoding import ADAPTIVE_SPEC, DEFAULT_SPEC, as_rows, pack, parse_spec, unpack, width
from octavo.numerics.formats import SUPPORTED_DTYPES
from octavo.numerics.spec import MessageSpec
from octavo.numerics.suggestions import check_choice
from octavo.runtime.switch import SWITCH

T = TypeVar("T")
Reduction = Literal["sum", "avg"]

# The second names are those before torch 2.13.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class AsyncResult(Generic[T]):
    def __init__(self, work: dist.Work | None, finish: Callable[[], T]) -> None:
        self._work, self._finish = work, finish

    def wait(self) -> T:
        """Wait for the bytes and return the decoded result. Call once."""
        if self._work is not None:
            self._work.wait()
        return self._finish()


def all_gather(
    x: Tensor, group: Group = None, *, spec: str = DEFAULT_SPEC, backward_spec: str | None = None,
    async_op: bool = False,
) -> Any:  # fmt: skip
    """Concatenate every rank's tensor along dimension 0.

    Args:
        x: [R, ...], float32, bfloat16 or float16, of the same shape on all ranks.
        group: Process group; None for the default group.
        spec: FP8 format of the message: e4m3 or e5m2 with scales by `1xN`, `row` or `tensor`, or `fp8/1x128`.
        backward_spec: FP8 format of the gradient, which a reduce_scatter returns; None for `spec`.
        async_op: Return an `AsyncResult` whose `wait()` returns the result.

    Returns:
        [W·R, ...] of x's dtype, within the error of `octavo.comm.encoding`, bitwise equal on all ranks.

    Raises:
        ValueError: For a wrong dtype or spec, no process group, or async_op on a tensor that autograd records.

    Examples:
        >>> x = torch.full((2, 64), 1.0 + dist.get_rank())      # on two ranks, under torchrun
        >>> octavo.comm.all_gather(x)[:, 0]
        tensor([1., 1., 2., 2.])
    """
    quant_spec, back = check_args("all_gather", x, spec, backward_spec, async_op)
    return differentiable(
        x, lambda x: _all_gather(x, group, quant_spec), lambda g: reduce_scatter(g, group, **back), async_op
    )


def reduce_scatter(
    x: Tensor, group: Group = None, *, op: Reduction = "sum", spec: str = DEFAULT_SPEC,
    backward_spec: str | None = None, async_op: bool = False,
) -> Any:  # fmt: skip
    """Sum the ranks' tensors x [W·R, ...] and give each rank its piece of the sum, [R, ...] of x's dtype.

    W is the size of the group. The sum is taken in float32 and rounded once to the dtype; `op="avg"` divides it by W.
    Other arguments and errors are those of `all_gather`, which returns the gradient.

    Raises:
        ValueError: As `all_gather`, or if the first dimension is not a multiple of W.

    Examples:
        >>> x = torch.full((2, 64), 1.0 + dist.get_rank())      # on two ranks, under torchrun
        >>> octavo.comm.reduce_scatter(x)[:, 0]
        tensor([3.])
    """
    quant_spec, back = check_args("reduce_scatter", x, spec, backward_spec, async_op)
    world = world_size(group)
    check_choice("op", op, ("sum", "avg"))
    if x.ndim == 0 or x.shape[0] % world:
        raise ValueError(
            f"reduce_scatter splits dimension 0 into {world} equal pieces, one per rank; got shape {list(x.shape)}: "
            "pad it to a multiple"
        )

    def backward(grad: Tensor) -> Any:
        gathered = all_gather(grad, group, **back)
        return gathered / world if op == "avg" else gathered

    return differentiable(x, lambda x: _reduce_scatter(x, group, op, quant_spec), backward, async_op)


def all_reduce(
    x: Tensor, group: Group = None, *, op: Reduction = "sum", spec: str = DEFAULT_SPEC,
    backward_spec: str | None = None, async_op: bool = False,
) -> Any:  # fmt: skip
    """Sum the ranks' tensors on all ranks, to a tensor like x that is bitwise equal on all of them.

    The sum is taken in float32 and rounded once more to FP8; `op="avg"` divides it by the group's size. The gradient is
    summed over the ranks, too. Arguments and errors are those of `all_gather`; `AsyncResult.wait()` gathers the sum.

    Examples:
        >>> x = torch.full((2, 64), 1.0 + dist.get_rank())      # on two ranks, under torchrun
        >>> octavo.comm.all_reduce(x, op="avg")[:, 0]
        tensor([1.5000, 1.5000])
    """
    quant_spec, back = check_args("all_reduce", x, spec, backward_spec, async_op)
    check_choice("op", op, ("sum", "avg"))
    return differentiable(
        x, lambda x: _all_reduce(x, group, op, quant_spec), lambda g: all_reduce(g, group, op=op, **back), async_op
    )


def all_to_all_single(
    x: Tensor, output_split_sizes: Sequence[int] | None = None, input_split_sizes: Sequence[int] | None = None,
    group: Group = None, *, spec: str = DEFAULT_SPEC, backward_spec: str | None = None, async_op: bool = False,
) -> Any:  # fmt: skip
    """Send rows of x [R, ...] to every rank and receive [sum of output_split_sizes, ...] of its dtype.

    The rows for rank 0 come first, then those for rank 1, and so on: `input_split_sizes` of them, and
    `output_split_sizes` to receive, equal parts if None or empty. A vector's rows are its elements; the part for one
    rank is quantized as one row. Other arguments are those of `all_gather`; the gradient travels the same way back.

    Raises:
        ValueError: As `all_gather`, and for splits that do not add up.

    Examples:
        >>> x = torch.full((2, 64), 1.0 + dist.get_rank())      # on two ranks, under torchrun
        >>> octavo.comm.all_to_all_single(x)[:, 0]
        tensor([1., 2.])
    """
    quant_spec, back = check_args("all_to_all_single", x, spec, backward_spec, async_op)
    world = world_size(group)
    if x.ndim == 0:
        raise ValueError("all_to_all_single sends parts of dimension 0; got a tensor without dimensions: use x.view(1)")
    sent = split_sizes("input_split_sizes", input_split_sizes, x.shape[0], world)
    equal = not output_split_sizes and not input_split_sizes
    received = sent if equal else split_sizes("output_split_sizes", output_split_sizes, None, world)
    return differentiable(
        x, lambda x: _all_to_all(x, group, sent, received, quant_spec),
        lambda g: all_to_all_single(g, sent, received, group, **back), async_op,
    )  # fmt: skip


def exchange_rows(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group, *, fp8: bool, spec: str = ADAPTIVE_SPEC
) -> Any:
    """Send rows to every rank and receive rows, in FP8 or exact; gradients travel the same way back."""
    if len(sent) == 1:
        return rows
    if fp8 and not SWITCH.off:
        return all_to_all_single(rows, received, sent, group, spec=spec, backward_spec=ADAPTIVE_SPEC)

    def start(rows: Tensor) -> AsyncResult[Tensor]:
        compare_calls("all_to_all_single", group, (list(rows.shape[1:]), rows.dtype), sent, received)
        arriving = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(arriving, rows.contiguous(), list(received), list(sent), group=group)
        return AsyncResult(None, lambda: arriving)

    return differentiable(rows, start, lambda g: exchange_rows(g, received, sent, group, fp8=False))


def all_to_all(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: Group = None, *, spec: str = DEFAULT_SPEC
) -> None:
    """Send a tensor of `inputs` to every rank and fill one of `outputs` from every rank. Not differentiable.

    There is one tensor per rank, of the sender's shape; shapes and dtypes may differ. Errors are those of `all_gather`.

    Examples:
        >>> x = torch.full((2, 64), 1.0 + dist.get_rank())      # on two ranks, under torchrun
        >>> outputs = [torch.empty(64), torch.empty(64)]
        >>> octavo.comm.all_to_all(outputs, list(x))
        >>> [output[0].item() for output in outputs]
        [1.0, 2.0]
    """
    world = world_size(group)
    for name, tensors in (("inputs", inputs), ("outputs", outputs)):
        if len(tensors) != world:
            raise ValueError(f"all_to_all: {name} must hold one tensor per rank, {world}; got {len(tensors)}")
        for tensor in tensors:
            quant_spec, _ = check_args("all_to_all", tensor, spec, None, False)
    coming, going = ([_bytes(tensor, quant_spec) for tensor in tensors] for tensors in (outputs, inputs))
    compare_calls("all_to_all", group, quant_spec.text, going, coming)
    message = torch.cat([encoding.pack(as_rows(tensor), quant_spec).flatten() for tensor in inputs])
    received = message.new_empty(sum(coming))
    dist.all_to_all_single(received, message, coming, going, group=group)
    for output, part in zip(outputs, received.split(coming), strict=True):
        rows = as_rows(output)
        if part.numel():
            rows = encoding.unpack(part.view(rows.shape[0], -1), rows.shape[1], quant_spec, output.dtype)
        output.detach().copy_(rows.view(output.shape))


def _all_gather(x: Tensor, group: Group, spec: MessageSpec) -> AsyncResult[Tensor]:
    world, rows = world_size(group), as_rows(x)
    compare_calls("all_gather", group, (list(x.shape), spec.text))
    message = encoding.pack(rows, spec)
    gathered = message.new_empty(world * message.shape[0], message.shape[1])
    work = gather_single(gathered, message, group=group, async_op=True)
    shape = (world * x.shape[0], *x.shape[1:]) if x.ndim else (world,)
    return AsyncResult(work, lambda: encoding.unpack(gathered, rows.shape[1], spec, x.dtype).view(shape))


def _reduce_scatter(x: Tensor, group: Group, op: Reduction, spec: MessageSpec) -> AsyncResult[Tensor]:
    world = world_size(group)
    compare_calls("reduce_scatter", group, (list(x.shape), spec.text))
    shape = (x.shape[0] // world, *x.shape[1:])
    return _reduced(as_rows(x, world), group, op, spec, lambda total: total.to(x.dtype).view(shape))


def _reduced(
    rows: Tensor, group: Group, op: Reduction, spec: MessageSpec, finish: Callable[[Tensor], Tensor]
) -> AsyncResult[Tensor]:
    """Send each rank its part of some rows; `finish` gets the sum of the parts, in float32 and in rank order."""
    world, message = world_size(group), encoding.pack(rows, spec)
    received = torch.empty_like(message)
    work = dist.all_to_all_single(received, message, group=group, async_op=True)

    def reduced() -> Tensor:
        first, *others = received.chunk(world) if received.numel() else [received] * world
        total = encoding.unpack(first, rows.shape[1], spec, torch.float32)
        for part in others:
            total += encoding.unpack(part, rows.shape[1], spec, torch.float32)
        return finish(total.div_(world) if op == "avg" else total)

    return AsyncResult(work, reduced)


def _all_reduce(x: Tensor, group: Group, op: Reduction, spec: MessageSpec) -> AsyncResult[Tensor]:
    world, count = world_size(group), x.numel()
    compare_calls("all_reduce", group, (list(x.shape), spec.text))
    unit = world * (spec.granularity.columns or 1)
    flat = torch.nn.functional.pad(x.detach().reshape(-1), (0, -count % unit)).view(world, -1)

    def finish(total: Tensor) -> Tensor:
        gathered = _all_gather(total, group, spec).wait()
        return gathered.reshape(-1)[:count].to(x.dtype).view(x.shape)

    return _reduced(flat, group, op, spec, finish)


def _all_to_all(
    x: Tensor, group: Group, sent: Sequence[int], received: Sequence[int], spec: MessageSpec
) -> AsyncResult[Tensor]:
    compare_calls("all_to_all_single", group, (list(x.shape[1:]), spec.text), sent, received)
    if x.ndim == 1:
        return _all_to_all_vector(x, group, sent, received, spec)
    rows = as_rows(x)
    columns = rows.shape[1]
    message = encoding.pack_parts(rows, sent, spec)
    going, coming = ([encoding.part_size(size, columns, spec) for size in sizes] for sizes in (sent, received))
    arriving = message.new_empty(sum(coming))
    work = dist.all_to_all_single(arriving, message, coming, going, group=group, async_op=True)
    shape = (sum(received), *x.shape[1:])
    return AsyncResult(work, lambda: encoding.unpack_parts(arriving, received, columns, spec, x.dtype).view(shape))


def _all_to_all_vector(
    x: Tensor, group: Group, sent: Sequence[int], received: Sequence[int], spec: MessageSpec
) -> AsyncResult[Tensor]:
    """Exchange a vector; each rank's elements are one row of a message."""
    parts = [
        encoding.pack(part.view(1, -1), spec) for part in x.detach().contiguous().split(list(sent)) if part.numel()
    ]
    message = torch.cat(parts, dim=1).view(-1) if parts else x.new_empty(0, dtype=torch.uint8)
    going, coming = ([encoding.width(size, spec) if size else 0 for size in sizes] for sizes in (sent, received))
    arriving = message.new_empty(sum(coming))
    work = dist.all_to_all_single(arriving, message, coming, going, group=group, async_op=True)

    def finish() -> Tensor:
        parts = zip(arriving.split(coming), received, strict=True)
        rows = [encoding.unpack(part.view(1, -1), size, spec, x.dtype).view(-1) for part, size in parts if size]
        return torch.cat(rows) if rows else x.new_empty(0)

    return AsyncResult(work, finish)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, start: Callable[[Tensor], AsyncResult[Tensor]], backward: Callable[[Tensor], Any]
    ) -> Tensor:
        ctx.of_gradient = backward
        return start(x).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.of_gradient(grad), None, None


def differentiable(
    x: Tensor, start: Callable[[Tensor], AsyncResult[Tensor]], backward: Callable[[Tensor], Any], async_op: bool = False
) -> Any:
    """Run a collective, whose gradient is `backward` of that of its result; return an `AsyncResult` if `async_op`."""
    if needs_grad(x):
        return _Differentiable.apply(x, start, backward)
    pending = start(x)
    return pending if async_op else pending.wait()


def _bytes(x: Tensor, spec: MessageSpec) -> int:
    rows, *rest = x.shape if x.ndim > 1 else (1, x.numel())
    return rows * encoding.width(math.prod(rest), spec)


# Send a tensor from one rank to another in FP8, as pipeline stages do. Autograd does not record these calls.


def send(x: Tensor, dst: int, group: Group = None, *, spec: str = DEFAULT_SPEC, tag: int = 0) -> None:
    """Send a tensor; return when the message may be freed. See `isend`.

    Examples:
        >>> rank = dist.get_rank()      # on two ranks, under torchrun
        >>> if rank == 0:
        ...     octavo.comm.send(torch.ones(4, 64), dst=1)
        ... else:
        ...     received = octavo.comm.recv((4, 64), src=0, dtype=torch.bfloat16)
    """
    isend(x, dst, group, spec=spec, tag=tag).wait()


def recv(
    shape: Sequence[int], src: int, group: Group = None, *, dtype: torch.dtype, device: torch.device | str = "cpu",
    spec: str = DEFAULT_SPEC, tag: int = 0,
) -> Tensor:  # fmt: skip
    """Receive a tensor. See `irecv`.

    Examples:
        >>> rank = dist.get_rank()      # on two ranks, under torchrun
        >>> if rank == 1:
        ...     octavo.comm.send(torch.ones(4, 64), dst=0)
        ... else:
        ...     received = octavo.comm.recv((4, 64), src=1, dtype=torch.float32)
    """
    return irecv(shape, src, group, dtype=dtype, device=device, spec=spec, tag=tag).wait()


def isend(x: Tensor, dst: int, group: Group = None, *, spec: str = DEFAULT_SPEC, tag: int = 0) -> AsyncResult[None]:
    """Start to send a tensor of any shape to the global rank `dst`, which calls `recv` with this shape and spec.

    The `AsyncResult` has to be waited for before the program ends; x may be changed at once. `tag` distinguishes
    several messages in flight (Gloo). Other arguments and errors are those of `octavo.comm.all_gather`.

    Examples:
        >>> rank = dist.get_rank()      # on two ranks, under torchrun
        >>> sending = octavo.comm.isend(torch.ones(4, 64), dst=1 - rank)
        >>> received = octavo.comm.recv((4, 64), src=1 - rank, dtype=torch.float32)
        >>> sending.wait()
    """
    world_size(group)
    quant_spec, _ = check_args("send", x.detach(), spec, None, False)
    message = pack(as_rows(x.detach()), quant_spec)
    work = dist.isend(message, dst, group=group, tag=tag)
    return AsyncResult(work, partial(lambda _: None, message))  # keeps the message alive until then


def irecv(
    shape: Sequence[int], src: int, group: Group = None, *, dtype: torch.dtype, device: torch.device | str = "cpu",
    spec: str = DEFAULT_SPEC, tag: int = 0,
) -> AsyncResult[Tensor]:  # fmt: skip
    """Start to receive a tensor from the global rank `src`; `wait()` of the `AsyncResult` returns it.

    `shape`, `spec` and `tag` are the sender's. Over Gloo another shape ends this process if the message is larger, and
    leaves the rest of the result undefined if it is smaller. `dtype` (float32, bfloat16 or float16) and `device` are
    those of the result. Errors are those of `isend`.

    Examples:
        >>> rank = dist.get_rank()      # on two ranks, under torchrun
        >>> receiving = octavo.comm.irecv((4, 64), src=1 - rank, dtype=torch.float32)
        >>> octavo.comm.send(torch.full((4, 64), 2.0), dst=1 - rank)
        >>> receiving.wait()[0, 0]
        tensor(2.)
    """
    world_size(group)
    if dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"recv returns float32, bfloat16 or float16; got {dtype}")
    quant_spec = parse_spec(spec)
    rows = as_rows(torch.empty(tuple(shape), device="meta"))
    message = torch.empty((rows.shape[0], width(rows.shape[1], quant_spec)), dtype=torch.uint8, device=device)
    work = dist.irecv(message, src, group=group, tag=tag)
    return AsyncResult(work, lambda: unpack(message, rows.shape[1], quant_spec, dtype).view(tuple(shape)))
