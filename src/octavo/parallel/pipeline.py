"""`PipelineStage`, a stage of `torch.distributed.pipelining` that sends FP8 messages, under torch's own schedules.

A schedule asks a stage for the point-to-point operations of each micro-batch. The stage replaces their payloads by
messages of `octavo.comm.encoding`, and decodes a received message into torch's buffer before the micro-batch is
computed. Both ends decide by the metadata that torch exchanges what travels in FP8.
"""

import math
from collections.abc import Iterable
from itertools import combinations, repeat
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from octavo.comm import ADAPTIVE_SPEC
from octavo.comm.checks import gather_objects
from octavo.comm.encoding import pack, parse_spec, unpack, width
from octavo.numerics.formats import SUPPORTED_DTYPES
from octavo.numerics.spec import FULL, MessageSpec
from octavo.parallel.combinations import problem_of
from octavo.runtime.switch import disabled
from octavo.runtime.torch_compat import gradients_of_stage, has_freed_weights, missing_in_pipelining

_STAGES: WeakSet["PipelineStage"] = WeakSet()


class PipelineStage(pipelining.PipelineStage):
    """A part of a model, on one rank of a pipeline, that exchanges activations and their gradients in FP8.

    It replaces `torch.distributed.pipelining.PipelineStage` in all stages of a pipeline, for every schedule of torch.

    Activations are [B,S,H] or [...,H], float32, bfloat16 or float16, and arrive in the dtype in which they were sent. A
    message takes 1.03 bytes per element if H is a multiple of 128. Other tensors, and all of `schedule.eval`, travel as
    they are; so does what two stages on one rank hand over.

    Args:
        submodule: The part of the model, converted or not, on `device`.
        stage_index: Position in the pipeline, from 0.
        num_stages: Stages of the pipeline, on all ranks.
        device: Device of the stage.
        fp8_comm: Exchange FP8 messages. Without it the stage computes what torch's does, bit for bit.
        spec: FP8 format of the messages, as of `octavo.comm.all_gather`. A row is a token.
        options: As for torch's class: `group`, `input_args`, `output_args`, `dw_builder`, ...

    Raises:
        ValueError: For an unknown spec. From the first step, on all ranks: if ranks differ in these settings, a
            schedule expects other stages on a rank, two stages on a rank share a parameter, or a layer has a scale per
            tensor. In a step whose micro-batches have other sizes than the first one, on the rank that would send it.
        RuntimeError: Before torch 2.13, whose stages do not exchange the metadata that this class needs. From the first
            backward, if a zero-bubble schedule meets weights that FSDP2 frees after forward.

    Parameters that stages on different ranks share, as tied embeddings, silently become separate: no rank sees both.

    Examples:
        Under `torchrun`, on each rank:

        >>> from torch.distributed.pipelining import ScheduleGPipe
        >>> rank, stages = dist.get_rank(), dist.get_world_size()
        >>> part = octavo.convert(torch.nn.Linear(128, 128), verbose=False)
        >>> stage = octavo.parallel.PipelineStage(part, rank, stages, torch.device("cpu"))
        >>> schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)
        >>> inputs = (torch.randn(4, 128),) if stage.is_first else ()
        >>> target = torch.randn(4, 128) if stage.is_last else None
        >>> output = schedule.step(*inputs, target=target)
        >>> part.weight.grad.isfinite().all()
        tensor(True)
    """

    def __init__(
        self, submodule: nn.Module, stage_index: int, num_stages: int, device: torch.device, *, fp8_comm: bool = True,
        spec: str = ADAPTIVE_SPEC, **options: Any,
    ) -> None:  # fmt: skip
        if missing := missing_in_pipelining():
            raise RuntimeError(
                f"octavo.parallel.PipelineStage needs torch 2.13: {torch.__version__} lacks {', '.join(missing)}. Use "
                "torch.distributed.pipelining.PipelineStage, which sends messages in high precision"
            )
        self._spec = parse_spec(spec) if fp8_comm else None
        super().__init__(submodule, stage_index, num_stages, device, **options)
        self._checked: dict[int, int] | None = None
        self._sent_shapes: list[torch.Size] | None = None
        self._activations: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._gradients: dict[int, list[tuple[Tensor, Tensor]]] = {}
        _STAGES.add(self)

    def clear_runtime_states(self) -> None:
        """Begin a step; the first one of a schedule compares the stages of all ranks."""
        if self._checked != self.stage_index_to_group_rank:
            # A schedule gives one mapping to all its stages of a rank.
            stages = [s for s in _STAGES if s.stage_index_to_group_rank is self.stage_index_to_group_rank]
            _check_pipeline(sorted(stages, key=lambda stage: stage.stage_index))
            for stage in stages:
                stage._checked = dict(stage.stage_index_to_group_rank)
        super().clear_runtime_states()

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with disabled():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with disabled():
            return super()._prepare_backward_infra(*args, **kwargs)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that receive a micro-batch's activations."""
        ops = super().get_fwd_recv_ops(fwd_chunk_id)
        ops, self._activations[fwd_chunk_id] = self._receiving(ops, gradients_of_stage(self, "inputs"))
        return ops

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that receive the gradients of a micro-batch's outputs."""
        ops, self._gradients[bwd_chunk_id] = self._receiving(super().get_bwd_recv_ops(bwd_chunk_id))
        return ops

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that send a micro-batch's outputs."""
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        shapes = [op.tensor.shape for op in ops]
        if self._sent_shapes is None:
            self._sent_shapes = shapes
        elif shapes != self._sent_shapes:
            raise ValueError(
                f"stage {self.stage_index}: micro-batch {fwd_chunk_id} sends {[list(s) for s in shapes]}, but its "
                f"receiver expects {[list(s) for s in self._sent_shapes]}, as of the first one: all micro-batches need "
                "one size, so choose a batch that n_microbatches divides, and drop or pad a smaller last batch"
            )
        return self._sending(ops, gradients_of_stage(self, "outputs"))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that send the gradients of a micro-batch's inputs."""
        return self._sending(super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs of a micro-batch from the activations received, or from `args` in the first stage."""
        self._decode(self._activations.pop(fwd_chunk_id, []))
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of a micro-batch from those received, or from its loss in the last stage."""
        self._decode(self._gradients.pop(bwd_chunk_id, []))
        if not (kwargs.get("full_backward", True) or self.is_first) and has_freed_weights(self.submod):
            raise RuntimeError(
                f"stage {self.stage_index}: zero-bubble schedules lose the gradients of weights that FSDP2 frees after "
                "forward. Shard with reshard_after_forward=False, or use another schedule, such as Interleaved1F1B"
            )
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    # `schedule.eval` runs backward's actions, too: torch 2.13's divide gradients, and raise with two stages on a rank.

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce and scale the gradients of a step; do nothing in evaluation."""
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Return the gradients of a micro-batch's inputs for a stage on this rank; none in evaluation."""
        stage: Any = super()
        return stage.get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Take the gradients of a micro-batch's outputs from a stage on this rank; none in evaluation."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _receiving(
        self, ops: list[dist.P2POp], differentiable: Iterable[bool] = repeat(True)
    ) -> tuple[list[dist.P2POp], list[tuple[Tensor, Tensor]]]:
        """Return operations that receive messages, and pairs of buffer and message to decode."""
        result, received = [], []
        for op, has_gradient in zip(ops, differentiable, strict=False):  # without a peer there are no operations
            if self._spec is not None and has_gradient and _is_activation(op.tensor):
                rows, columns = _matrix_shape(op.tensor.shape, self._spec)
                message = op.tensor.new_empty((rows, width(columns, self._spec)), dtype=torch.uint8)
                received.append((op.tensor, message))
                op = _with_payload(op, message)
            result.append(op)
        return result, received

    def _sending(self, ops: list[dist.P2POp], differentiable: Iterable[bool] = repeat(True)) -> list[dist.P2POp]:
        result = []
        for op, has_gradient in zip(ops, differentiable, strict=False):
            if self._spec is not None and has_gradient and _is_activation(op.tensor):
                x = op.tensor.reshape(_matrix_shape(op.tensor.shape, self._spec))
                op = _with_payload(op, pack(x, self._spec))
            result.append(op)
        return result

    def _decode(self, received: list[tuple[Tensor, Tensor]]) -> None:
        for buffer, message in received:
            assert self._spec is not None
            _, columns = _matrix_shape(buffer.shape, self._spec)
            # Not copied: gradients such as those of a sum have strides of zero, which torch gives its buffers, too.
            buffer.data = unpack(message, columns, self._spec, buffer.dtype).view(buffer.shape)


def _is_activation(x: Tensor) -> bool:
    return x.dtype in SUPPORTED_DTYPES and x.ndim >= 2


def _matrix_shape(shape: torch.Size, spec: MessageSpec) -> tuple[int, int]:
    """Return the shape of a payload's matrix: a row per token; or per sequence, with the same groups, if these fit."""
    extent = spec.granularity.columns
    if extent != FULL and shape[-1] % extent == 0:
        return shape[0], math.prod(shape[1:])
    return math.prod(shape[:-1]), shape[-1]


def _with_payload(op: dist.P2POp, tensor: Tensor) -> dist.P2POp:
    return dist.P2POp(op.op, tensor, op.peer, op.group, op.tag)


def _check_pipeline(stages: list[PipelineStage]) -> None:
    """Raise on all ranks of a pipeline if one has a problem, or if its stages do not fit those of the others."""
    group, mapping = stages[0].group, stages[0].stage_index_to_group_rank
    report: dict[str, Any] = {
        "stages": [stage.stage_index for stage in stages],
        "settings": sorted({(stage.num_stages, stage._spec.text if stage._spec else "no FP8") for stage in stages}),
        "problem": _problem_of(stages),
    }
    reports = gather_objects(report, group)
    for rank, other in enumerate(reports):
        if other["problem"] is not None:
            raise ValueError(f"octavo.parallel.PipelineStage, rank {rank} of the pipeline: {other['problem']}")
    if any(other["settings"] != reports[0]["settings"] for other in reports) or len(report["settings"]) > 1:
        listed = "; ".join(f"rank {rank}: {other['settings']}" for rank, other in enumerate(reports))
        raise ValueError(
            "octavo.parallel.PipelineStage: stages differ in (num_stages, FP8 format of messages), which must be equal "
            f"in one pipeline: {listed}"
        )
    expected = [[i for i, owner in sorted(mapping.items()) if owner == rank] for rank in range(len(reports))]
    if [other["stages"] for other in reports] != expected:
        raise ValueError(
            f"octavo.parallel.PipelineStage: ranks hold the stages {[other['stages'] for other in reports]}, but the "
            f"schedule expects {expected}. V schedules (ZBV, DualPipeV) take stages i and {len(mapping)}-1-i on rank "
            "i, others i, i + ranks, i + 2·ranks, …; schedules of one stage take as many stages as ranks"
        )


def _problem_of(stages: list[PipelineStage]) -> str | None:
    for stage in stages:
        of = f" of stage {stage.stage_index}"
        if (problem := problem_of("pipeline", stage.submod, of)) is not None:
            return problem
    for one, other in combinations(stages, 2):
        names = {id(p): name for name, p in one.submod.named_parameters()}
        for name, parameter in other.submod.named_parameters():
            if id(parameter) in names:
                return (
                    f"stages {one.stage_index} and {other.stage_index} share a parameter ({names[id(parameter)]}, "
                    f"{name}). Each stage divides its gradients by the number of micro-batches, so this one would be "
                    "divided twice. Give each stage a parameter of its own"
                )
    return None
