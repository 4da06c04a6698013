"""Benchmarks for minutes on a GPU, without one: what their rows hold, and that every part rehearses."""

import json
import warnings

import pytest
import torch
from benchmarks import deep, loss, published, ranks
from benchmarks.timing import Rehearsal

from octavo.kernels.conformance import Check
from processes import gloo  # noqa: F401
from support.sessions import CPU, session_of

NO_PEERS = ["--peers", "nowhere"]


def rehearse(module, *words, out):
    module.main(["--rehearse", *NO_PEERS, "--out", str(out), *words])
    content = json.loads((out / f"{module.__name__.rpartition('.')[2]}.json").read_text())
    errors = [row for row in content["rows"] if "error" in row]
    assert not errors, errors[0]
    return content


# published


def test_published_figures_become_ratios():
    of = {workload.name: workload for workload in published.WORKLOADS}
    assert of["te-llama-2-7b"].ratio("te fp8") == pytest.approx(1.55)
    assert of["torchao-2048"].ratio("torchao tensorwise") < 1
    titan, nanochat = of["torchtitan-llama-3-8b"], of["nanochat-d26"]
    assert titan.ratio("torchao tensorwise") == pytest.approx(1.25, abs=0.01)
    assert nanochat.ratio("torchao rowwise") == pytest.approx(0.895, abs=0.001)
    assert titan.rival("octavo rowwise") == nanochat.rival("octavo rowwise") == "torchao tensorwise"
    assert titan.rival("torchao rowwise") == "torchao rowwise" and titan.rival("bf16") is titan.rival("te fp8") is None
    assert of["colossalai-4096"].rival("octavo rowwise") is None
    assert len(of) == len(published.WORKLOADS) and all(workload.source for workload in of.values())


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
