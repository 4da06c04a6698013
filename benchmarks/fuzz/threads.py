"""Contexts that overlap in threads of their own, `"spans"` of [context, start, length], and forwards of one converted
model at the same time: bitwise the plain model inside of `octavo.disabled()`, else the converted one.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from benchmarks.fuzz import outcome
from benchmarks.fuzz.activations import convert, plain_run, precision_of
from benchmarks.fuzz.build import Case, build, inputs
from benchmarks.fuzz.outcome import PASS, Outcome, fail
from octavo.kernels.conformance.mismatches import difference

CONTEXTS: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    "disabled": lambda model: octavo.disabled(), "accumulating": octavo.nn.accumulating,
    "no_grad": lambda model: torch.no_grad(), "inference": lambda model: torch.inference_mode(),
    "autocast": lambda model: torch.autocast("cpu", torch.bfloat16),
}  # fmt: skip
_SECONDS = 60.0


def check(case: Case) -> Outcome:
    model, x = build(case), inputs(case)
    plain_run(build(case), case, x)
    expected = {True: _run(model, x)}
    precision = precision_of(case)
    convert(model, replace(precision, keep_weights=precision.matmul == "fp8"))
    expected[False] = _run(model, x)
    with outcome.around_octavo(model):
        problem = _overlap(case, model, x, expected) or _at_once(case, model, x)
    return PASS if problem is None else fail("threads", problem)


def _run(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    grads = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
    return [y.detach(), *(torch.zeros(()) if g is None else g for g in grads)]


def _mismatch(when: str, expected: list[Tensor], actual: list[Tensor]) -> str | None:
    return difference(expected, actual, [f"result {i} {when}" for i in range(len(expected))])


def _overlap(case: Case, model: nn.Module, x: Tensor, expected: dict[bool, list[Tensor]]) -> str | None:
    spans = [(CONTEXTS[name](model), ThreadPoolExecutor(1), name, *when) for name, *when in case.get("spans", ())]
    problem = None
    for now in range(8):
        for context, thread, _, start, length in spans:
            if now == start + length:
                thread.submit(context.__exit__, None, None, None).result(_SECONDS)
        for context, thread, _, start, _ in spans:
            if now == start:
                thread.submit(context.__enter__).result(_SECONDS)
        active = [name for _, _, name, start, length in spans if start <= now < start + length]
        problem = problem or _mismatch(f"inside of {active}", expected["disabled" in active], _run(model, x))
    for _, thread, *_ in spans:
        thread.shutdown()
    return problem


def _at_once(case: Case, model: nn.Module, x: Tensor) -> str | None:
    count = case.get("forwards", 2)
    xs = [x * (1 + i) for i in range(count)]
    expected, barrier = [_run(model, x) for x in xs], threading.Barrier(count)

    def work(x: Tensor) -> list[list[Tensor]]:
        torch.set_num_threads(1)  # a setting of each thread
        barrier.wait(_SECONDS)
        return [_run(model, x) for _ in range(3)]

    with ThreadPoolExecutor(count) as pool:
        results = list(pool.map(work, xs, timeout=_SECONDS))
    pairs = ((own, each) for own, runs in zip(expected, results, strict=True) for each in runs)
    return next(filter(None, (_mismatch("beside other threads", own, each) for own, each in pairs)), None)
