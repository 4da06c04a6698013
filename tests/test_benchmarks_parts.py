"""Benchmarks for minutes on a GPU, without one: what their rows hold, and that every part rehearses."""

import argparse
import json
import signal
import sys
import threading
import types
import warnings
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks import deep, loss, published, ranks
from benchmarks.session import Session
from benchmarks.timing import Rehearsal, Timing

from octavo.kernels.conformance import Check
from octavo.train.signals import stop_on
from processes import gloo  # noqa: F401

CPU = torch.device("cpu")
NO_PEERS = ["--peers", "nowhere"]


def rehearse(module, *words, out):
    module.main(["--rehearse", *NO_PEERS, "--out", str(out), *words])
    content = json.loads((out / f"{module.__name__.rpartition('.')[2]}.json").read_text())
    errors = [row for row in content["rows"] if "error" in row]
    assert not errors, errors[0]
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


@pytest.mark.slow
def test_published_workloads_rehearse(tmp_path, capsys):
    content = rehearse(published, out=tmp_path)
    assert len(content["rows"]) == 3 * len(published.WORKLOADS) and not content["timed"]
    assert [row["arm"] for row in content["rows"][:3]] == ["bf16", "octavo rowwise", "octavo tensorwise"]
    assert all(row["source"] for row in content["rows"])
    assert "Transformer Engine is not importable" in capsys.readouterr().out


# ranks


def ranks_job(names, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: ranks.CASES[name](CPU, folder / name) for name in names}


@pytest.mark.thorough
@pytest.mark.dist
def test_cases_of_ranks_on_two_processes(gloo, tmp_path):  # noqa: F811
    names = ("collectives", "streams", "fsdp-on", "ddp-hook", "checkpoint", "graph")
    first, second = gloo.run(ranks_job, 2, names, tmp_path)
    assert all(first[name] for name in names) and ranks.compared(first["streams"], first["collectives"]) is None
    assert first["fsdp-on"]["losses"].tolist() == second["fsdp-on"]["losses"].tolist()
    assert ranks.compared(first["fsdp-on"], second["fsdp-on"]) is None and len(first["fsdp-on"]) == 15


def test_what_differs_from_the_cpu_is_named():
    noise = torch.randn(400)
    reference = {"losses": torch.tensor([2.0, 1.0]), "exact sum": torch.ones(3), "gradient w": noise}
    assert ranks.compared(reference, {**reference, "gradient w": 1.01 * noise}) is None
    for name, value in (("losses", [2.0, 1.1]), ("losses", [2.0, float("nan")]), ("exact sum", [1, 1, 1.001])):
        assert name in ranks.compared(reference, {**reference, name: torch.tensor(value)})
    assert "gradient w" in ranks.compared(reference, {**reference, "gradient w": 1.2 * noise})
    assert ranks.compared(reference, {"losses": reference["losses"]}) == "has ['exact sum', 'gradient w'] alone"


def test_a_case_that_ends_its_world_leaves_a_row_and_the_next_runs(tmp_path, monkeypatch):
    made = []

    class Fake:
        def __init__(self, *arguments):
            made.append(arguments)

        def start(self, case):
            self.case = case

        def results(self):
            if self.case == "deadly":
                raise RuntimeError("rank 1 is silent, dead")
            return {"exact x": torch.ones(2) * (2 if self.case == "wrong" and made[-1][2] != CPU else 1)}

        def close(self):
            made.append("closed")

    monkeypatch.setattr(ranks, "World", Fake)
    session, pair = session_of("ranks", tmp_path, Rehearsal()), ranks.Pair("nccl", 1, torch.device("meta"))
    rows = [session.attempt({"case": case}, lambda case=case: pair.measure(case)) for case in ("deadly", "good")]
    assert "rank 1 is silent" in rows[0]["error"] and rows[1]["result"] == ranks.SAME
    assert made[:2] == made[4:] == [("nccl", 1, torch.device("meta")), ("gloo", 1, CPU)]
    assert made[2:4] == ["closed", "closed"]


@pytest.mark.slow
def test_ranks_rehearse(tmp_path):
    rows = rehearse(ranks, out=tmp_path)["rows"]
    assert len(rows) == 2 * len(ranks.CASES) and {row["result"] for row in rows} == {ranks.SAME}


# deep


def test_a_wrong_kernel_is_counted(tmp_path):
    session = session_of("deep", tmp_path, Rehearsal())
    seeds = []
    same = {"inputs": lambda rng: seeds.append(rng.seed) or (rng.normal(4),), "expected": lambda x: [x]}
    good = Check(op="op", case="e4m3 a", configs=(0,), actual=lambda x, config: [x], **same)
    bad = Check(op="op", case="e4m3 b", configs=(0, 1), actual=lambda x, config: [x + config], **same)
    assert list(deep.families([good, bad])) == ["op e4m3"]
    row = deep.compared(session, [good], 0)
    assert (row["result"], row["cases"], row["mismatches"]) == (deep.SAME, 1, 0)
    session.clock.timed = True  # as on a GPU: all configurations, twice
    row = deep.compared(session, [good, bad], 7)
    assert [seed[0] for seed in seeds] == ["0", "7", "7"]
    assert (row["configurations"], row["runs"], row["mismatches"], row["wrong"]) == (3, 6, 2, 1)
    assert row["result"].startswith("WRONG: op e4m3 b, configuration 1: round 0") and "output 0" in row["result"]


def test_the_pool_compiles_every_case_and_counts_what_fails(tmp_path, monkeypatch):
    asked = []

    class Pool:
        def __init__(self, workers, mp_context):
            self._processes = {}

        def submit(self, function, index, only):
            asked.append((function, index, only))
            future = Future()
            future.set_exception(RuntimeError("no")) if index == 1 else future.set_result(None)
            return future

        def shutdown(self, wait, cancel_futures):
            asked.append("over")

    monkeypatch.setattr(deep, "ProcessPoolExecutor", Pool)
    session = session_of("deep", tmp_path, Rehearsal())
    session.options.only = "glu"
    row = deep.compile_all(session, 3, 5.0)
    assert row["failed"] == 1 and row["result"].startswith("2 of 3 cases")
    assert asked == [*((deep.compile_case, index, "glu") for index in range(3)), "over"]


@pytest.mark.thorough
def test_deep_rehearses_an_op(tmp_path):
    content = rehearse(deep, "--only", "dequantize e4m3", out=tmp_path)
    assert content["wrong"] == 0 and {row["result"] for row in content["rows"]} == {deep.SAME}
    with pytest.raises(SystemExit):
        deep.main(["--rehearse", "--only", "no such case"])


# loss


def test_texts_are_gathered_in_order(tmp_path):
    for name, size in (("b.py", 300), ("a.md", 400), ("small.txt", 10), ("c.bin", 500), ("z/d.rst", 700)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name[0] * size)
    (tmp_path / "latin.txt").write_bytes(b"\xe4" * 300)
    for megabytes, letters in ((1.0, "abz"), (0.00075, "ab")):
        assert loss.gather(tmp_path, tmp_path / "out.jsonl", megabytes) == len(letters)
        lines = (tmp_path / "out.jsonl").read_text().splitlines()
        assert [json.loads(line)["text"][0] for line in lines] == list(letters)


def test_gaps_are_by_tokens_and_by_seconds():
    def curve(losses, step_s):
        seconds = np.cumsum([step_s] * len(losses))
        return {"tokens": np.arange(1, len(losses) + 1) * 8, "seconds": seconds, "loss": np.array(losses),
                "tokens_per_s": 8 / step_s}  # fmt: skip

    base, fp8 = curve([4.0, 2.0], 1.0), curve([4.1, 3.0, 2.1, 1.0], 0.5)
    row = loss.gap_row(base, fp8)
    assert (row["steps"], row["gap_percent"], row["tokens_ratio"]) == (2, 50.0, 2.0)
    assert (row["seconds"], row["gap_percent_by_seconds"]) == (2.0, -50.0)
    assert loss.run_row(fp8)["curve"] == [[8, 0.5, 4.1], [16, 1.0, 3.0], [24, 1.5, 2.1], [32, 2.0, 1.0]]
    assert loss.gap_row(base, curve([float("nan")], 1.0))["gap_percent"] is None


def test_a_run_is_stopped_and_so_is_the_next():
    before = signal.getsignal(signal.SIGTERM)
    with loss.stopping_after(0.05, again=0.05):
        for _ in range(2):
            stop = threading.Event()
            with stop_on(stop, signal.SIGTERM):
                assert stop.wait(10)
    assert signal.getsignal(signal.SIGTERM) is before
    with loss.stopping_after(None):
        pass


@pytest.mark.slow
def test_a_later_call_goes_on_with_the_losses(tmp_path, monkeypatch):
    monkeypatch.setattr(loss, "TINY", loss.TINY | {"run.steps": 40})
    monkeypatch.setattr(loss.tempfile, "TemporaryDirectory", lambda: nullcontext(str(tmp_path / "runs")))
    first = rehearse(loss, "--minutes", "0", out=tmp_path)
    assert first["stopped"] == "time" and sum(row.get("steps", 0) for row in first["rows"]) < 40
    content = rehearse(loss, out=tmp_path)
    assert content["stopped"] == "done" and content["compare"]["arms"]
    assert [row["steps"] for row in content["rows"]] == [40] * 6
    assert [row["stage"] for row in content["rows"]] == ["run", "run", "gap"] * 2
