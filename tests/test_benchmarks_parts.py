"""Benchmarks for minutes on a GPU, without one: what their rows hold, and that every part rehearses."""

import argparse
import json
import sys
import types
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from benchmarks import published
from benchmarks.session import Session
from benchmarks.timing import Rehearsal, Timing

CPU = torch.device("cpu")
NO_PEERS = ["--peers", "nowhere"]


def rehearse(module, *words, out):
    module.main(["--rehearse", *NO_PEERS, "--out", str(out), *words])
    content = json.loads((out / f"{module.__name__.rpartition('.')[2]}.json").read_text())
    errors = [row for row in content["rows"] if "error" in row]
    assert content["rows"] and not errors, errors[0]
    return content


class Scripted:
    """Says that the n-th call takes so many milliseconds, and runs it."""

    timed, l2_bytes = True, 0.0

    def __init__(self, *milliseconds):
        self.left = list(milliseconds)

    def measure(self, runs, *, wall=True):
        for run in runs:
            run()
        ms = self.left.pop(0)
        return Timing(ms, 2 * ms, 0.01, "graph")


def session_of(name, tmp_path, clock):
    return Session(name, CPU, clock, argparse.Namespace(arguments=[]), paths=[tmp_path / f"{name}.json"])


# published


def test_published_figures_become_ratios():
    of = {workload.name: workload for workload in published.WORKLOADS}
    assert (
        of["te-llama-2-7b"].ratio("te fp8") == pytest.approx(1.55)
        and of["torchao-2048"].ratio("torchao tensorwise") < 1
    )
    titan, nanochat = of["torchtitan-llama-3-8b"], of["nanochat-d26"]
    assert titan.ratio("torchao tensorwise") == pytest.approx(1.25, abs=0.01)
    assert nanochat.ratio("torchao rowwise") == pytest.approx(0.895, abs=0.001)
    assert titan.rival("octavo rowwise") == nanochat.rival("octavo rowwise") == "torchao tensorwise"
    assert titan.rival("torchao rowwise") == "torchao rowwise" and titan.rival("bf16") is titan.rival("te fp8") is None
    assert of["colossalai-4096"].rival("octavo rowwise") is None
    assert len(of) == len(published.WORKLOADS) and all(workload.source for workload in of.values())


def test_a_published_row_is_timed_in_turns_with_bf16(tmp_path):
    # bf16, arm; three turns: medians 4 and 2
    session = session_of("published", tmp_path, Scripted(4.0, 3.0, 9.0, 2.0, 3.0, 1.0))
    workload = replace(published.WORKLOADS[1], size=published.TINY["linear"], mode="eager")
    turns = published.Turns(session, workload)
    row = session.attempt({"arm": "octavo rowwise"}, lambda: turns.measure("octavo rowwise"))
    assert "error" not in row, row["error"]
    assert (row["bf16_kernel_ms"], row["kernel_ms"], row["speedup"], row["spread"]) == (4.0, 2.0, 2.0, 1.0)
    assert row["published_ms"] == 4.06 and row["published_arm"] == "torchao tensorwise"
    assert row["beside"] == pytest.approx(2 / (4.79 / 4.06), abs=1e-4)


def test_a_step_has_the_layers_that_fit():
    whole = published.WORKLOADS[0]
    layers = [published.fitted(whole, gib * 2**30).size.layers for gib in (1, 78, 400)]
    assert layers[0] == 1 < layers[1] < layers[2] == 32
    part = replace(whole, size=replace(whole.size, layers=8))
    row = published.beside(part, "te fp8", {"wall_ms": 30.0, "bf16_wall_ms": 60.0}, 32)
    assert (row["published_ms"], row["published_ms_scaled"], row["layers"], row["speedup"]) == (160, 40.0, 8, 2.0)


def test_transformer_engine_takes_the_place_of_linears(monkeypatch, tmp_path):
    contexts = []

    class Linear(torch.nn.Linear):
        def __init__(self, inputs, outputs, bias, params_dtype):
            super().__init__(inputs, outputs, bias, dtype=params_dtype)

        def forward(self, x):
            assert contexts[-1] == "open"
            return super().forward(x)

    @contextmanager
    def autocast(enabled):
        contexts.extend([enabled, "open"])
        yield
        contexts.append("closed")

    te = types.ModuleType("transformer_engine.pytorch")
    te.Linear, te.fp8_autocast = Linear, autocast
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", te)
    sys.modules["transformer_engine"].pytorch = te
    assert published.has_transformer_engine()
    session = session_of("published", tmp_path, Rehearsal())
    inner = torch.nn.Sequential(
        torch.nn.Linear(16, 32, bias=False), torch.nn.ReLU(), torch.nn.Linear(32, 16, bias=False)
    )
    for module, arm in ((inner, "te fp8"), (torch.nn.Linear(16, 8, bias=False), "te bf16")):
        made = published.converted(module, arm, session)
        assert made(torch.randn(4, 16).bfloat16()).dtype == torch.bfloat16
        linears = [m for m in made.modules() if isinstance(m, torch.nn.Linear)]
        assert linears and all(type(linear) is Linear for linear in linears)
    assert contexts == [True, "open", "closed", False, "open", "closed"]


@pytest.mark.thorough
def test_published_workloads_rehearse(tmp_path, capsys):
    content = rehearse(published, "--workloads", "te-llama-2-7b", "colossalai-4096", out=tmp_path)
    assert [row["arm"] for row in content["rows"]] == ["bf16", "octavo rowwise", "octavo tensorwise"] * 2
    assert not content["timed"] and all(row["source"] for row in content["rows"])
    assert "Transformer Engine is not importable" in capsys.readouterr().out


@pytest.mark.slow
def test_all_published_workloads_rehearse(tmp_path):
    assert len(rehearse(published, out=tmp_path)["rows"]) == 3 * len(published.WORKLOADS)
