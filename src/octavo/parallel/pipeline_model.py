"""Pipeline: a causal language model of Transformers as the stages of a pipeline, under torch's schedules.

    embedding, blocks 0…i  ──[B,S,H]──▶  blocks i…j  ──▶ … ──▶  blocks …n, norm, head and loss

Each stage runs the model's own forward, with `Absent` in the place of what other stages have. Where blocks do not
divide evenly, later stages have one more, except the last, which has the head.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from octavo.nn.causal import adds_router_loss
from octavo.nn.equalized import equalized_layers, reset_scales
from octavo.numerics.suggestions import check_choice
from octavo.parallel.combinations import check_model
from octavo.runtime.blocks import Absent, find_block_list
from octavo.runtime.switch import disabled

SCHEDULES = {  # Stages per rank of each schedule
    "GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "LoopedBFS": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}  # fmt: skip
V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")
PROBE_TOKENS = 4
Args = tuple[Any, ...]  # Of a block
Kwargs = dict[str, Any]


def stages_of(rank: int, ranks: int, schedule: str) -> list[int]:
    if SCHEDULES[schedule] == 1:
        return [rank]
    return [rank, 2 * ranks - 1 - rank if schedule in V_SCHEDULES else rank + ranks]


def divide(blocks: int, stages: int) -> list[range]:
    sizes = [blocks // stages] * stages
    for extra in range(blocks % stages):
        sizes[(-2 - extra) % stages] += 1
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


class StageModule(nn.Module):
    """One stage: what it has of a model, and the model's forward around it."""

    def __init__(self, model: Any, blocks: range, *, first: bool, last: bool, token_parts: int = 1) -> None:
        super().__init__()
        self._model, self._first, self._last, self._token_parts = (model,), first, last, token_parts
        base = model.base_model
        members = find_block_list(base)
        self.width: int = model.config.get_text_config().hidden_size
        self.parts = nn.ModuleList(members[index] for index in blocks)
        for name, module in ends_of(model, first=first, last=last).items():
            self.add_module(name, module)
        everything = enumerate(members)
        self._list = (nn.ModuleList(block if index in blocks else Absent() for index, block in everything),)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return hidden states [B,S,H]; of the last stage the loss, [1], if there are `labels`."""
        model: Any = self._model[0]
        with installed(model, self._list[0], norm=self._last), self._divided(x) as whole:
            arguments: dict[str, Any] = {"input_ids" if self._first else "inputs_embeds": whole, "use_cache": False}
            if not self._last:
                return model.base_model(**arguments)[0]  # type: ignore[no-any-return]
            outputs = model(labels=labels, shift_labels=labels, **arguments)
        return torch.stack([outputs.loss])  # no view, of which FSDP2 warns

    @contextmanager
    def _divided(self, x: Tensor) -> Iterator[Tensor]:
        """Yield a tensor of as many tokens as attention reads, for masks and positions; the first block gets x."""
        if self._first or self._token_parts == 1:
            yield x
            return

        def give(block: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
            return ((x, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x})

        with self.parts[0].register_forward_pre_hook(give, with_kwargs=True, prepend=True):
            yield x.detach()[:, :1].expand(-1, x.shape[1] * self._token_parts, -1)


def ends_of(model: Any, *, first: bool, last: bool) -> dict[str, nn.Module]:
    """Return the modules beside the blocks that a stage has, by a name without dots."""
    modules: dict[str, nn.Module] = {}
    if first:
        modules["embedding"] = model.get_input_embeddings()
    if last:
        modules |= {"norm": model.base_model.norm, "head": model.get_output_embeddings()}
    return modules


@contextmanager
def installed(model: Any, blocks: nn.ModuleList, *, norm: bool) -> Iterator[None]:
    """Give a model the blocks of a stage, and no final norm unless the stage has it."""
    base = model.base_model
    name = next(name for name, module in base.named_children() if module is find_block_list(base))
    before = {name: base._modules[name], "norm": base._modules["norm"]}
    base._modules[name] = blocks
    if not norm:
        base._modules["norm"] = Absent()
    try:
        yield
    finally:
        base._modules.update(before)


@torch.no_grad()
def check_pipeline_model(model: Any, stages: int) -> None:
    """Raise ValueError if a model cannot be cut into so many stages: by its structure, and by trying it."""
    check_pipeline_structure(model, stages)
    training = model.training
    model.eval()
    try:
        with disabled():
            _try(model, find_block_list(model.base_model), type(model).__name__)
    finally:
        model.train(training)


def check_pipeline_structure(model: Any, stages: int) -> None:
    """Raise ValueError if the structure of a model, on any device, shows that it cannot be cut into so many stages."""
    kind, base = type(model).__name__, getattr(model, "base_model", None)
    base = base if isinstance(base, nn.Module) else nn.Module()
    blocks = find_block_list(base)
    ends = all(isinstance(getattr(base, name, None), nn.Module) for name in ("norm", "embed_tokens"))
    if not (len(blocks) and ends and blocks in list(base.children())):
        raise ValueError(
            f"{kind} cannot be a pipeline: it is not embed_tokens, a list of blocks, norm and a head, as Llama is"
        )
    if len(blocks) < stages:
        raise ValueError(f"{kind} has {len(blocks)} blocks, fewer than {stages} stages: use fewer ranks, or a schedule "
                         "with one stage per rank (GPipe, 1F1B)")  # fmt: skip
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        raise ValueError(
            f"{kind} ties its head to its embedding, which are on different stages: set tie_word_embeddings = false in "
            "its config"
        )
    check_model("pipeline", model)
    if adds_router_loss(model):
        raise ValueError(f"{kind} adds a loss of the routers of all blocks (output_router_logits), which no stage sees")


def _try(model: Any, blocks: nn.ModuleList, kind: str) -> None:
    """Compare the first two blocks in one stage and in two, bit for bit."""
    weight = model.get_input_embeddings().weight
    ids = torch.arange(PROBE_TOKENS, device=weight.device).unsqueeze(0) % weight.shape[0]

    def run(indices: tuple[int, ...], **inputs: Tensor) -> Tensor:
        chosen = nn.ModuleList(block if index in indices else Absent() for index, block in enumerate(blocks))
        with installed(model, chosen, norm=False):
            hidden: Tensor = model.base_model(use_cache=False, **inputs)[0]
        return hidden

    embedded = run((), input_ids=ids)
    if not torch.equal(run((), inputs_embeds=embedded), embedded):
        raise ValueError(f"{kind} cannot be a pipeline: it changes inputs_embeds before its first block")
    whole, first = run((0, 1), input_ids=ids), run((0,), input_ids=ids)
    run((0,), input_ids=ids.flip(1))  # what it leaves behind is of other tokens now
    if not torch.equal(run((1,), inputs_embeds=first), whole):
        raise ValueError(f"{kind} cannot be a pipeline: its blocks pass on more than hidden states")


def cut(model: Any, mesh: DeviceMesh, schedule: str) -> list[int]:
    """Replace what the stages of other ranks have by `Absent`, in place. Returns the stages of this rank."""
    check_choice("schedule", schedule, SCHEDULES)
    stages = stages_of(mesh.get_local_rank(), mesh.size(), schedule)
    count = mesh.size() * SCHEDULES[schedule]
    members = find_block_list(model.base_model)
    own = {index for stage in stages for index in divide(len(members), count)[stage]}
    for index in set(range(len(members))) - own:
        members[index] = Absent()
    remove_ends(model, first=0 in stages, last=count - 1 in stages)
    return stages


def remove_ends(model: Any, *, first: bool, last: bool) -> None:
    """Replace the embedding by `Absent`, unless a rank has the `first` stage; norm and head, unless the `last`."""
    if not first:
        model.base_model.embed_tokens = Absent()
    if not last:
        model.base_model.norm = Absent()
        model.set_output_embeddings(Absent())


def stage_modules(
    model: Any, stages: list[int], ranks: int, schedule: str, *, token_parts: int = 1
) -> dict[int, nn.Module]:
    """Return the stages of this rank by index, after `cut`; `token_parts` as of `StageModule`."""
    count = ranks * SCHEDULES[schedule]
    blocks = divide(len(find_block_list(model.base_model)), count) if stages else []
    ends = {stage: {"first": stage == 0, "last": stage == count - 1} for stage in stages}
    return {stage: StageModule(model, blocks[stage], **ends[stage], token_parts=token_parts) for stage in stages}


class Pipeline:
    def __init__(
        self, parts: dict[int, nn.Module], mesh: DeviceMesh, schedule: str, device: torch.device, *, micro_batches: int,
        fp8_comm: bool,
    ) -> None:  # fmt: skip
        from torch.distributed.pipelining.schedules import get_schedule_class

        from octavo.parallel.pipeline import PipelineStage  # slow import

        self.parts, self._scale = {i: part for i, part in parts.items() if isinstance(part, StageModule)}, 1.0
        self.count = count = mesh.size() * SCHEDULES[schedule]
        stages = [
            PipelineStage(part, index, count, device, fp8_comm=fp8_comm, group=mesh.get_group())
            for index, part in parts.items()
        ]
        self.first, self.last = 0 in parts, count - 1 in parts
        kind: Any = get_schedule_class(schedule)
        several = SCHEDULES[schedule] > 1
        self._schedule = kind(
            stages if several else stages[0], micro_batches, loss_fn=lambda loss, target: loss.sum() * self._scale,
            scale_grads=False,
        )  # fmt: skip

    def step(self, inputs: Tensor, targets: Tensor, scale: float) -> Tensor:
        """Compute the gradients of a batch. Returns the sum of the losses of its micro-batches; 0 without the head."""
        losses = self._run(self._schedule.step, inputs, targets, scale)
        return torch.stack(losses).sum() / scale if self.last else torch.zeros((), device=targets.device)

    def losses(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return the loss of each micro-batch of a batch, without gradients; None without the head. As `step`."""
        losses = self._run(self._schedule.eval, inputs, targets, 1.0)
        return torch.stack(losses) if self.last else None

    def _run(self, call: Callable[..., object], inputs: Tensor, targets: Tensor, scale: float) -> list[Tensor]:
        self._scale, losses = scale, list[Tensor]()
        own = {"target": targets, "losses": losses} if self.last else {}
        call(*((inputs,) if self.first else ()), **own, labels=targets, return_outputs=False)
        return [loss.detach() for loss in losses]

    def alone(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run the stages of this rank one after the other, without the others. Returns the last output."""
        # Stages other than the first read zeros, so channel scales that were measured meanwhile are dropped.
        x = inputs
        for index, part in sorted(self.parts.items()):
            if index and x is inputs:
                weight = next(p for p in part.parameters() if p.is_floating_point())
                x = torch.zeros(
                    *targets.shape, part.width, dtype=weight.dtype, device=inputs.device, requires_grad=True
                )
            x = part(x, labels=targets)
            for _, layer in equalized_layers(part):
                reset_scales(layer)
        return x
