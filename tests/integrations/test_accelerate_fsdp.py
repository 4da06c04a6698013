"""accelerate's FSDP2 with FP8 on two ranks, trained, saved and resumed, with Gloo.

accelerate 1.15 ignores an FSDP plugin on CPUs: `AcceleratorState.__init__` (accelerate/state.py) reads it only if
`distributed_type` is one of a list of MULTI_… devices that lacks MULTI_CPU, and trains with DDP. What it calls for
FSDP2 runs on CPUs, so the test sets what that branch would have set.
"""

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate import DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from torch.distributed.tensor import DTensor

import octavo
from octavo.integrations.accelerate import Fp8Accelerator
from processes import gloo  # noqa: F401
from support.llamas import become_rank_of_two, small_llama
from support.tool_loops import plain_loop
from tensors import same

STEPS = 6
LEVEL = "fp8+activations+optimizer"


def tokens():
    starts = torch.randint(0, 64, (STEPS, 8, 1), generator=torch.Generator().manual_seed(3))
    return (starts + 3 * torch.arange(16)) % 64


def accelerator_with_fsdp2():
    become_rank_of_two()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False, state_dict_type="SHARDED_STATE_DICT",
    )  # fmt: skip
    accelerator = Fp8Accelerator(cpu=True, precision=LEVEL, fsdp_plugin=plugin)
    assert accelerator.distributed_type == DistributedType.MULTI_CPU, accelerator.distributed_type
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    assert accelerator.is_fsdp2, vars(accelerator.state)
    return accelerator


def prepared():
    accelerator = accelerator_with_fsdp2()
    model = small_llama(torch.bfloat16)
    model, optimizer = accelerator.prepare(model, octavo.AdamW(model.parameters(), lr=1e-3))
    return accelerator, model, optimizer


def train(accelerator, model, optimizer, batches):
    parts = (batch.chunk(2)[dist.get_rank()] for batch in batches)
    return plain_loop(model, optimizer, parts, accelerator.backward)


def run(folder):
    accelerator, model, optimizer = prepared()
    losses = train(accelerator, model, optimizer, tokens()[:3])
    accelerator.save_state(folder)
    losses += train(accelerator, model, optimizer, tokens()[3:])
    sharded = sum(isinstance(parameter, DTensor) for parameter in model.parameters())
    fp8 = sum(row.converted for row in octavo.report(model))
    weights = {name: value.full_tensor() for name, value in model.state_dict().items()}

    accelerator, model, optimizer = prepared()
    accelerator.load_state(folder)
    resumed = train(accelerator, model, optimizer, tokens()[3:])
    resumed_weights = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return losses, resumed, same(weights, resumed_weights), sharded, len(weights), fp8


@pytest.mark.slow
def test_fsdp2_trains_like_one_rank_and_resumes(gloo, tmp_path):  # noqa: F811
    model = octavo.convert(small_llama(torch.bfloat16), precision=octavo.Precision.level(LEVEL), verbose=False)
    optimizer, expected = octavo.AdamW(model.parameters(), lr=1e-3), []
    for batch in tokens():
        halves = [model(input_ids=half, labels=half).loss for half in batch.chunk(2)]
        expected.append([half.item() for half in halves])
        (sum(halves) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank, result in enumerate(gloo.run(run, 2, str(tmp_path), timeout=600.0)):
        losses, resumed, equal, sharded, parameters, fp8 = result
        assert sharded == parameters and fp8 == 14
        assert losses == pytest.approx([pair[rank] for pair in expected], rel=2e-3)
        assert resumed == losses[3:] and equal
