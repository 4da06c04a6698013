"""A small language model, trained by one process and by many on the same shares of the same batches."""

import warnings
from contextlib import contextmanager
from functools import cache, partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.optim import AdamW
from octavo.parallel import Parallel, parallelize
from octavo.parallel.fsdp import parameters_in_fp8
from tensors import one_thread

VOCABULARY, WIDTH = 97, 64


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.checkpointing = False

    def forward(self, x):
        return checkpoint(self._forward, x, use_reentrant=False) if self.checkpointing else self._forward(x)

    def _forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tiny(nn.Module):
    def __init__(self, hidden=128, blocks=2, ties=None, width=WIDTH):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if ties == "head":
            self.head.weight = self.embed.weight
        elif ties == "blocks":
            self.blocks[1].up.weight = self.blocks[0].up.weight
        elif ties == "inside":
            self.blocks[0].down.weight = self.blocks[0].up.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make(recipe="rowwise", checkpointing=False, frozen=(), seed=0, dtype=torch.float32, backend=None, **options):
    torch.manual_seed(seed)
    model = Tiny(**options).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(frozen)) if frozen else True)
    if recipe is not None:
        octavo.convert(model, recipe, verbose=False)
    for block in model.blocks:
        block.checkpointing = checkpointing
        if backend is not None:
            block.compile(backend=backend, fullgraph=True)
    return model


@contextmanager
def backend_options(backend):
    """A compiler starts afresh; its warnings, which are not ours to answer for, stay warnings."""
    with warnings.catch_warnings():
        if backend is not None:
            torch._dynamo.reset()
            warnings.simplefilter("default")
        yield


def share(step, rank, micro):
    """Tokens [2, 9] of a rank's micro-batch: sequences that count up, so that there is something to learn."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + micro)
    start = torch.randint(VOCABULARY, (2, 1), generator=generator)
    return (start + torch.arange(9) * torch.randint(1, 4, (2, 1), generator=generator)) % VOCABULARY


def mesh_of(name="tp"):
    """All ranks, in one dimension."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_bytes(value):
    """All of a tensor as bytes, in a last dimension: Gloo sends no float8."""
    local = value.to_local() if isinstance(value, DTensor) else value
    parts = local.reshape(-1).view(torch.uint8).view(*local.shape, local.element_size())
    if local is value:
        return parts
    shape = torch.Size((*value.shape, local.element_size()))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(parts, value.device_mesh, value.placements, shape=shape, stride=stride).full_tensor()


def loss_of(model, tokens, micros=1):
    logits = full(model(tokens[:, :-1]))
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()) / micros


def batch(step):
    """Tokens [4, 17] of a step, the same on every rank."""
    return torch.randint(0, VOCABULARY, (4, 17), generator=torch.Generator().manual_seed(step))


def steps_of(model, steps, make_optimizer=None, data=(0, 1)):
    """Losses, and the gradients of the last step, as plain tensors; `data` is this rank's share of each batch."""
    make_optimizer = make_optimizer or partial(torch.optim.AdamW, foreach=False)
    optimizer = make_optimizer(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step).chunk(data[1])[data[0]])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, {name: full(parameter.grad) for name, parameter in model.named_parameters()}


def gradients_of(model, backward, batches):
    """Gradients [batches, ...] of the parameters of this rank, whole: of one batch, a norm's has too few elements."""
    gradients = {}
    for step in range(batches):
        model.zero_grad()
        backward(step)
        for name, parameter in model.named_parameters():
            gradients.setdefault(name, []).append(full(parameter.grad).clone())
    return {name: torch.stack(of_batches) for name, of_batches in gradients.items()}


def tensor_parallel(model, mesh, plan, sequence):
    """Distribute the blocks by a plan; with `sequence`, each rank has a part of the tokens between them."""
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate(), use_local_output=False),
    }  # fmt: skip
    for block in model.blocks:
        parallelize_module(block, mesh, plan | ({"norm": SequenceParallel()} if sequence else {}))
    return parallelize_module(model, mesh, ends if sequence else {})


def optimizer_of(kind, parameters):
    parameters = [p for p in parameters if p.requires_grad]
    if kind == "octavo":
        return AdamW(parameters, lr=1e-2)
    if kind == "sgd":  # a gradient in another order of summation moves it little, a gradient of another size much
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def alone(world, steps=20, micros=1, optimizer="torch", reverse=False, pairs=False, between=None, **model_options):
    """Losses [rank][step] and parameters of one process, which adds up the gradients of what would be the ranks.

    In their order, in the reverse, or those of ranks 0 and 1 and those of 2 and 3 first. `between`: what to do with the
    model before a step.
    """
    model = make(**model_options)
    parameters = [p for p in model.parameters() if p.requires_grad]
    stepper = optimizer_of(optimizer, model.parameters())
    losses = [[] for _ in range(world)]
    for step in range(steps):
        if between and step in between:
            between[step](model)
        gradients = []
        for rank in range(world):
            losses[rank].append(0.0)
            for micro in range(micros):
                loss = loss_of(model, share(step, rank, micro), micros)
                loss.backward()
                losses[rank][-1] += loss.item()
            gradients.append([p.grad for p in parameters])
            stepper.zero_grad()
        if pairs:
            gradients = [[a + b for a, b in zip(*gradients[i : i + 2], strict=True)] for i in range(0, world, 2)]
        for parameter, *grads in zip(parameters, *(reversed(gradients) if reverse else gradients), strict=True):
            parameter.grad = sum(grads[1:], grads[0]) / world
        stepper.step()
        stepper.zero_grad()
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


@cache
def one_process(*args, **options):
    """`alone` in one thread, as ranks compute; once for each set of options."""
    with one_thread(), backend_options(options.get("backend")):
        return alone(*args, **options)


def train(model, steps=20, micros=1, optimizer="torch", first=0, stepper=None, sync_each=False):
    """A rank's losses [step] with a model that is parallel."""
    stepper = stepper or optimizer_of(optimizer, model.parameters())
    rank, losses = dist.get_rank(), []
    for step in range(first, first + steps):
        total = 0.0
        for micro in range(micros):
            last = micro == micros - 1 or sync_each
            if isinstance(model, nn.parallel.DistributedDataParallel):
                model.require_backward_grad_sync = last
            else:
                model.set_requires_gradient_sync(last)
            loss = loss_of(model, share(step, rank, micro), micros)
            loss.backward()
            total += loss.item()
        losses.append(total)
        stepper.step()
        stepper.zero_grad()
    return losses


def whole(model):
    """Parameters of a parallel model, whole, by the names of the model that was given."""
    return {name.removeprefix("module."): full(p).detach().clone() for name, p in model.state_dict().items()}


def run(settings, options=None, in_fp8=None):
    """A rank's losses [step], and the whole parameters, of a run with `Parallel(**settings)`; asserts the names of the
    weights that are gathered in FP8, if they are given.
    """
    options = dict(options or {})
    of_training = {name: options.pop(name) for name in ("steps", "micros", "optimizer", "sync_each") if name in options}
    dtype, parameters = options.pop("dtype", None), options.pop("parameters", True)
    model = parallelize(make(**options), Parallel(**settings), dtype=dtype)
    assert in_fp8 is None or set(parameters_in_fp8(model)) == set(in_fp8)
    with backend_options(options.get("backend")):
        losses = train(model, **of_training)
    return losses, whole(model) if parameters else {}
