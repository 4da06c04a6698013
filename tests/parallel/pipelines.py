"""The model of `training`, cut into pipeline stages, and trained under torch's schedules or by one process."""

import math
from contextlib import nullcontext
from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from training import make, share

import octavo
from octavo.comm import ADAPTIVE_SPEC
from octavo.comm.encoding import pack, parse_spec, unpack
from octavo.parallel import PipelineStage

SINGLE = ("GPipe", "1F1B")
V = ("ZBVZeroBubble", "DualPipeV")
SCHEDULES = (*SINGLE, "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", *V)
MICROS = 4


class Part(nn.Module):
    """Blocks of a model; with its embedding in the first stage, norm and head in the last."""

    def __init__(self, model, index, stages):
        super().__init__()
        each = len(model.blocks) // stages
        self.embed = model.embed if index == 0 else None
        self.blocks = model.blocks[index * each : (index + 1) * each]
        self.norm, self.head = (model.norm, model.head) if index == stages - 1 else (None, None)

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def stages_of(name, rank, ranks):
    if name in SINGLE:
        return [rank], ranks
    return ([rank, 2 * ranks - 1 - rank] if name in V else [rank, rank + ranks]), 2 * ranks


def loss_fn(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def batch(step, micros=MICROS):
    """Tokens [8·micros, 9] of a step."""
    return torch.cat([share(step, rank, micro) for micro in range(micros) for rank in range(4)])


class Pipeline:
    """A rank's stages of a model under a schedule."""

    def __init__(self, name, model, cls=PipelineStage, micros=MICROS, wrap=None, group=None, loss=loss_fn, **options):
        device = torch.device("cpu")
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        indices, total = stages_of(name, rank, ranks)
        self.model = model
        self.parts = nn.ModuleList(Part(model, i, total) for i in indices)
        if wrap is not None:
            self.parts = nn.ModuleList(wrap(part) for part in self.parts)
        self.stages = [
            cls(part, i, total, device, group=group, **options) for i, part in zip(indices, self.parts, strict=True)
        ]
        kind = pipelining.schedules.get_schedule_class(name)
        self.schedule = kind(self.stages[0] if name in SINGLE else self.stages, micros, loss_fn=loss)
        self.first, self.last = 0 in indices, total - 1 in indices

    def step(self, tokens, call="step"):
        """The loss of each micro-batch, on the rank of the last stage."""
        losses = []
        inputs = (tokens[:, :-1],) if self.first else ()
        target = {"target": tokens[:, 1:], "losses": losses} if self.last else {}
        getattr(self.schedule, call)(*inputs, **target)
        return [loss.item() for loss in losses]


def train(pipeline, steps, lr=1e-3, first=0, around=nullcontext):
    """The mean loss of each step, on the rank of the last stage."""
    stepper, result = torch.optim.AdamW(pipeline.parts.parameters(), lr=lr, foreach=False), []
    for step in range(first, first + steps):
        with around():
            losses = pipeline.step(batch(step))
        stepper.step()
        stepper.zero_grad()
        if losses:
            result.append(sum(losses) / len(losses))
    return result


class Message(torch.autograd.Function):
    """An activation on its way to another rank, and its gradient on the way back."""

    @staticmethod
    def forward(ctx, x, spec):
        ctx.spec = parse_spec(spec)
        return rounded(x, ctx.spec)

    @staticmethod
    def backward(ctx, g):
        return rounded(g, ctx.spec), None


def rounded(x, spec):
    rows = x.reshape(-1, x.shape[-1])
    return unpack(pack(rows, spec), rows.shape[1], spec, x.dtype).view(x.shape)


@cache
def one_process(steps, micros=MICROS, lr=1e-3, recipe="rowwise", boundaries=(), spec=ADAPTIVE_SPEC, **options):
    """The mean loss of each step, of the whole model with the same micro-batches; with messages before some blocks."""
    model = make(recipe, **options)
    for index in boundaries:
        model.blocks[index].register_forward_pre_hook(lambda block, args: Message.apply(*args, spec))
    stepper, result = torch.optim.AdamW(model.parameters(), lr=lr, foreach=False), []
    for step in range(steps):
        losses = []
        for tokens in batch(step, micros).chunk(micros):
            loss = loss_fn(model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            losses.append(loss.item())
        for parameter in model.parameters():
            parameter.grad.div_(micros)
        stepper.step()
        stepper.zero_grad()
        result.append(sum(losses) / len(losses))
    return result


def difference(losses, reference):
    assert len(losses) == len(reference) and all(map(math.isfinite, losses)), losses
    return max(abs(a - b) / b for a, b in zip(losses, reference, strict=True))


def converted(recipe="rowwise", keep_weights=False, activations="bf16", **options):
    model = make(None, **options)
    return octavo.convert(model, recipe, keep_weights=keep_weights, activations=activations, verbose=False)
