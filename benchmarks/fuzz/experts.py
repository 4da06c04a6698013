"""Experts distributed over two ranks beside one process with all of them: bitwise for exact messages of Mixtral's
experts at multiples of 16, else within `EACH_DB`, as is one process beside float64.
"""

import copy
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import octavo
from benchmarks.fuzz.build import DTYPES, Case, values
from benchmarks.fuzz.modules import transformers
from benchmarks.fuzz.outcome import EACH_DB, FEW, PASS, Invalid, Outcome, fail, same
from benchmarks.fuzz.ranks import WORLD, on_ranks
from octavo.numerics import sqnr

_CLASSES = {"mixtral": ("MixtralConfig", "MixtralExperts"), "gpt_oss": ("GptOssConfig", "GptOssExperts")}
FAMILIES = tuple(_CLASSES)
ROUTINGS = ("random", "one", "duplicate", "absent", "negative")
_GRADIENTS = {"tiny": "tiny", "spread": "spread_rows"}  # Forms of the gradient of the output beside those of the tokens
Batch, Results = tuple[Tensor, Tensor, Tensor, Tensor], dict[str, Tensor]


def check(case: Case) -> Outcome:
    if find_spec("transformers") is None:
        raise Invalid("experts are Transformers'")
    return on_ranks(job, case)


def job(case: Case) -> Outcome:
    rank, tokens = dist.get_rank(), list(case.get("tokens", [7, 33]))
    plain = _experts(case)
    one = octavo.convert(copy.deepcopy(plain), case.get("recipe", "rowwise"), verbose=False)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",))
    batches = [_batch(case, count, number) for number, count in enumerate(tokens)]
    whole: Any = [torch.cat(parts) for parts in zip(*batches, strict=True)]
    expected = _results(one, whole)
    outcome = _in_float64(case, plain, whole, expected)
    for fp8 in (False, True):
        if outcome.failed:
            break
        distributed = octavo.parallel.expert_parallel(copy.deepcopy(one), mesh, fp8_comm=fp8)
        outcome = _compare(case, expected, _results(distributed, batches[rank]), tokens, fp8)
    return outcome


def _compare(case: Case, expected: Results, actual: Results, tokens: list[int], fp8: bool) -> Outcome:
    for name, value in actual.items():
        by_token = name in ("y", "x", "weights")
        reference = expected[name].split(tokens)[dist.get_rank()] if by_token else expected[name] / WORLD
        if value.shape != reference.shape or value.dtype != reference.dtype:
            return fail("shape", f"{name}: {value.dtype} {list(value.shape)}, one process {list(reference.shape)}")
        multiples = all(case.get(size, 64) % 16 == 0 for size in ("hidden", "inner"))
        exact = not fp8 and multiples and case.get("family", "mixtral") == "mixtral"
        if exact and (problem := same(name, reference, value)) is not None:
            return fail("bits", problem)
        if by_token and not torch.equal(reference.isfinite().all(1), value.isfinite().all(1)):
            return fail("not finite", f"{name}: finite in other tokens than in one process")
        if "values" not in case and reference.numel() > FEW and reference.any():
            db = sqnr(reference, value)
            if not db >= EACH_DB:
                return fail("messages", f"{name}: {db:.1f} dB, promised {EACH_DB:g} dB")
    return PASS


def _in_float64(case: Case, plain: nn.Module, batch: Batch, actual: Results) -> Outcome:
    if "values" in case or not batch[0].numel():
        return PASS
    x, index, weights, grad = batch
    absent = (index < 0) | (index >= case.get("experts", 8))
    wide = x.double(), index.masked_fill(absent, 0), weights.double().masked_fill(absent, 0.0), grad.double()
    exact = _results(plain.double(), wide)
    for name, reference in exact.items():
        reference = reference.masked_fill(absent, 0.0) if name == "weights" else reference
        if reference.numel() > FEW and reference.any() and (db := sqnr(reference, actual[name].double())) < EACH_DB:
            return fail("gradient", f"{name}: {db:.1f} dB, promised {EACH_DB:g} dB")
    return PASS


def _experts(case: Case) -> nn.Module:
    family = case.get("family", "mixtral")
    config, experts = transformers(family, *_CLASSES[family])
    settings: Any = config(
        hidden_size=case.get("hidden", 64), intermediate_size=case.get("inner", 96),
        num_local_experts=case.get("experts", 8),
    )  # fmt: skip
    settings._experts_implementation = "eager"
    module: nn.Module = experts(settings)
    generator = torch.Generator().manual_seed(case.get("seed", 0))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    return module.to(DTYPES[case.get("dtype", "fp32")])


def _batch(case: Case, tokens: int, number: int) -> Batch:
    """Tokens, the experts of each, routing weights, and the gradient of the output."""
    g = torch.Generator().manual_seed(1000 * case.get("seed", 0) + number)
    dtype, experts, k = DTYPES[case.get("dtype", "fp32")], case.get("experts", 8), case.get("k", 2)
    form = case.get("values")
    x, grad = (values([tokens, case.get("hidden", 64)], kind, dtype, g) for kind in (form, _GRADIENTS.get(form)))
    weights = torch.rand(tokens, k, generator=g) + 0.1
    index = torch.rand(tokens, experts, generator=g).argsort(1)[:, :k]
    routing = case.get("routing", "random")
    if routing == "one":
        index = torch.full_like(index, experts - 1)
    elif routing == "duplicate":
        index = index[:, :1].expand(-1, k)
    elif routing in ("absent", "negative"):
        index[torch.rand(index.shape, generator=g) < 0.4] = experts + number if routing == "absent" else -1 - number
    return x, index, weights.to(dtype), grad


def _results(module: nn.Module, batch: Batch) -> Results:
    x, index, weights, grad = batch
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = module(x, index, weights)
    y.backward(grad)
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    values: Any = {"y": y.detach(), "x": x.grad, "weights": weights.grad, **gradients}
    return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in values.items() if v is not None}
