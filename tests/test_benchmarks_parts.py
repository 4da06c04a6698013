"""Benchmarks for minutes on a GPU, without one: what their rows hold, and that every part rehearses.

Of `run`, every configuration parses, and runs end or fail.
"""

import json
import sys
import warnings
from pathlib import Path

import pytest
import torch
from benchmarks import arms, deep, host_gpu, loss, profiling, published, ranks, run, smoke, step
from benchmarks.environment import read_json, unfinished
from benchmarks.profiling import Kernel
from benchmarks.session import LEAST_LIMIT_S
from benchmarks.timing import Rehearsal, Timing

from octavo.kernels.conformance.mismatches import Check
from octavo.train import load_config
from processes import gloo  # noqa: F401
from support.sessions import CPU, session_of

NO_PEERS = ["--peers", "nowhere"]


def rehearse(module, *words, out):
    module.main(["--rehearse", *NO_PEERS, "--out", str(out), *words])
    content = json.loads((out / f"{module.__name__.rpartition('.')[2]}.json").read_text())
    errors = [row for row in content["rows"] if "error" in row]
    assert not errors, errors[0]
    return content


# --- published ---


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


# --- ranks ---


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


# --- deep ---


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


# --- loss ---


def test_texts_are_gathered_in_order(tmp_path):
    for name, size in (("b.py", 300), ("a.md", 400), ("small.txt", 10), ("c.bin", 500), ("z/d.rst", 700)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name[0] * size)
    (tmp_path / "latin.txt").write_bytes(b"\xe4" * 300)
    for megabytes, letters in ((1.0, "abz"), (0.00075, "ab")):
        assert loss.gather(tmp_path, tmp_path / "out.jsonl", megabytes) == len(letters)
        lines = (tmp_path / "out.jsonl").read_text().splitlines()
        assert [json.loads(line)["text"][0] for line in lines] == list(letters)


# --- smoke ---


SHAPE = (48, 64, 32)


class Drifting:
    """A clock on which each measurement takes one millisecond longer than the last."""

    timed, l2_bytes = True, 0.0

    def __init__(self):
        self.ms = 0.0

    def measure(self, runs, *, wall=True):
        for call in runs:
            call()
        self.ms += 1.0
        return Timing(self.ms, 5 * self.ms, 0.01, "graph")

    def peak_mib(self, run):
        return 3.0


@pytest.fixture
def drifting(tmp_path):
    return session_of("smoke", tmp_path, Drifting())


@pytest.mark.thorough
def test_a_profile_on_a_cpu_has_operations_with_their_own_time():
    x = torch.randn(8, 8, requires_grad=True)

    def run():
        with torch.profiler.record_function("whole"):
            (x @ x).sum().backward()

    run()
    kernels = profiling.record(run, CPU)
    products = [kernel for kernel in kernels if kernel.name == "aten::mm"]
    assert len(products) == 3 and all(kernel.phases == ("whole",) and kernel.us > 0 for kernel in products)
    assert sum(kernel.stack[0].startswith("autograd::engine") for kernel in products) == 2
    assert {kernel.stack[-1] for kernel in products} == {"aten::mm"}


def test_arms_are_timed_in_turns(drifting):
    calls = []
    figures = arms.in_turns(drifting, [lambda: calls.append("bf16")], [lambda: calls.append("arm")])
    assert calls == ["bf16", "arm"] * 3
    assert figures == {
        "method": "graph", "rounds": 3, "kernel_ms": 4.0, "wall_ms": 20.0, "bf16_kernel_ms": 3.0, "bf16_wall_ms": 15.0,
        "speedup": 0.75, "wall_speedup": 0.75, "speedup_range": [0.5, 0.8333], "wall_speedup_range": [0.5, 0.8333],
        "spread": 1.0, "bf16_spread": 1.33333,
    }  # fmt: skip


@pytest.mark.thorough
def test_rows_of_smoke(drifting):
    row = smoke.measure(drifting, SHAPE, "rowwise")
    assert all(28 < row[f"sqnr_{name}"] < 31 for name in smoke.OUTPUTS), row
    assert (row["kernel_ms"], row["bf16_kernel_ms"], row["speedup"]) == (4.0, 3.0, 0.75)
    assert row["profile"][0]["us"] >= row["profile"][1]["us"] > 0 and row["profile"][0]["count"] > 0
    same = smoke.measure(drifting, SHAPE, "bf16")
    assert [same[f"sqnr_{name}"] for name in smoke.OUTPUTS] == [999.0] * 3


@pytest.mark.thorough
def test_smoke_is_rehearsed(tmp_path):
    content = rehearse(smoke, "--quick", out=tmp_path)
    assert [row["arm"] for row in content["rows"]] == ["octavo rowwise", "octavo tensorwise", "bf16"]
    assert not content["timed"]
    assert all(row["profile"] and row["kernel_ms"] is None and row["m"] == SHAPE[0] for row in content["rows"])


@pytest.mark.thorough
def test_rows_of_host_time(drifting, monkeypatch):
    monkeypatch.setattr(host_gpu, "CALLS", 1)
    row = host_gpu.measure(drifting, "linear", 32, 64, arms.Arm("octavo rowwise"))
    assert (row["kernel_ms"], row["wall_ms"], row["waiting"], row["bf16_wall_ms"]) == (4.0, 20.0, 0.8, 15.0)
    assert row["host_ratio"] == pytest.approx(row["host_ms"] / row["bf16_host_ms"], abs=1e-3) and row["host_ratio"] > 1
    assert row["predicted_host_ratio"] == host_gpu.RATIOS["rowwise"]
    assert "predicted_host_ratio" not in host_gpu.measure(drifting, "linear", 32, 64, arms.Arm("bf16"))


# --- step ---


BACKWARD, STEP = "autograd::engine::evaluate_function: ", "Optimizer.step#AdamW.step"
# By part: kernel, enclosing operations, phases.
KERNELS = {
    "products": [
        ("nvjet_hsh_128x256", "aten::linear aten::mm", ""), ("promoted_kernel", "_PlannedLinear", ""),
        ("Memset", "_PlannedLinear aten::_scaled_mm", ""), ("aten::add_", "_LinearFunction octavo::scaled_mm", ""),
    ],
    "quantizers": [
        ("rows_kernel", "", ""), ("Memset", "_PlannedLinearBackward", ""),
        ("aten::mul_", "_LinearFunction octavo::quantize aten::mul_", ""),
    ],
    "attention": [("flash_fwd_kernel", "", ""), ("copy", "ScaledDotProductFlashAttentionBackward0", "")],
    "head": [
        ("nvjet_hsh_128x256", "_ChunkedFunction aten::mm", ""), ("elementwise", "_ChunkedFunctionBackward", ""),
    ],
    "rest": [("norm_rows_kernel", "_NormFunction", ""), ("elementwise", "aten::silu", "")],
    "accumulation": [("elementwise", "aten::to", "accumulation")],
    "clipping": [
        ("multi_tensor_apply_kernel", "aten::_foreach_norm", "clipping"),
        ("multi_tensor_apply_kernel", "aten::_foreach_mul_", "update"),
    ],
    "optimizer": [
        ("multi_tensor_apply_kernel", "aten::_foreach_mul_", f"update {STEP}"), ("adamw_kernel", "", f"update {STEP}"),
        ("elementwise", "aten::copy_", "update"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", step.PARTS)
def test_a_kernel_belongs_to_a_part(name):
    for kernel, stack, phases in KERNELS[name]:
        operations = [BACKWARD + each if each.endswith(("Backward", "Backward0")) else each for each in stack.split()]
        assert step.part(Kernel(kernel, 0.0, 1.0, tuple(operations), tuple(phases.split()))) == name, kernel


@pytest.mark.thorough
def test_rows_of_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr(step, "WARMUP", 1)
    monkeypatch.setattr(step, "STEPS", 1)
    on_cpu = session_of("step", tmp_path, compile="none")
    base = step.trainer(on_cpu, run.TINY, "bf16")
    monkeypatch.setattr(step, "predict", lambda session, config, parts: {"predicted": len(parts)})
    row = step.measure(on_cpu, run.TINY, "fp8", lambda: base)
    parts = row["parts"]
    assert row["predicted"] == len(parts) == len(step.PARTS) + 1
    taken = {name for name, part in parts.items() if part["ms"] > 0 and part["count"] > 0}
    assert taken >= {*step.PARTS} - {"accumulation"}, parts  # a step of one micro-batch adds up no gradients
    assert parts["accumulation"]["count"] == 0, parts
    assert row["wall_ms"] > 0 and row["bf16_wall_ms"] > 0 and row["wall_speedup_range"][0] <= row["wall_speedup"]
    assert row["tokens_per_s"] == pytest.approx(4 * 32 / row["wall_ms"] * 1e3, rel=0.01)
    assert base.step == 1 + arms.ROUNDS  # of warm-up, and one in each turn


# --- run ---


TRAIN = """
import json, sys, time
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--out") + 1])
folder.mkdir()
expected = {"memory": 8 * 2**30, "tokens_per_s": 5000.0}
summary = {"parameters": 7, "versions": {"torch": "2"}, "saved_bytes_per_token": 9.0}
(folder / "setup.json").write_text(json.dumps({"summary": summary, "expected": expected}))
metrics = (folder / "metrics.jsonl").open("w")
for step in range(1, 9):
    row = {"step": step, "tokens": 100 * step, "loss": 8.0 - step, "step_s": 0.02 * step if step > 5 else 1}
    row |= {"time": time.time(), "mfu": 0.1 * step, "peak_memory": 2**30 * step}
    print(json.dumps(row), file=metrics, flush=True)
print("  first step after 3.1 s (9.9 of CPUs): imports 1.5, others 1.6")
(folder / "run.json").write_text(json.dumps({"startup": {"imports": 1.5}, "state_bytes_per_parameter": 4.2}))
"""


@pytest.fixture
def timed(tmp_path):
    return session_of("run", tmp_path, limit=30.0, sizes=list(run.SIZES))


@pytest.fixture
def train(tmp_path, monkeypatch, timed):
    """Runs what stands in for `octavo train`, which takes 8 steps."""

    def measure(arm, code=TRAIN):
        script = tmp_path / "train.py"
        script.write_text(code)
        monkeypatch.setattr(run, "COMMAND", [sys.executable, str(script)])
        size = run.Size(None, {"optim.lr": 1.0}, steps=8, ends=True)
        identity = {"stage": "octavo train", "shape": "small", "arm": arm, "mode": "eager"}
        return timed.attempt(identity, lambda: run.measure(timed, "small", size, "full"))

    return measure


@pytest.mark.parametrize("name", [*run.SIZES, "tiny"])
def test_every_configuration_is_one(tmp_path, name):
    size = {**run.SIZES, "tiny": run.TINY}[name]
    levels = {"full": "fp8+activations+optimizer", "bf16 again": "bf16"}
    for level in run.LEVELS:
        words = run.command(size, level, tmp_path)
        config = load_config(Path(words[4]), words[5:-2])
        assert config.run.steps == size.steps and words[-2:] == ["--out", str(tmp_path / "out")]
        assert config.precision.level == levels.get(level, level)
        assert config.parallel.fp8_comm == ("on" if level == "full" else "auto")


def test_rows_of_a_run(train):
    bf16, fp8 = train("bf16"), train("fp8", TRAIN.replace("8.0 - step", "8.25 - step"))
    assert bf16["ended"] == "done" and bf16["command_s"] >= bf16["first_step_s"] > 0
    assert (bf16["wall_ms"], bf16["tokens_per_s"]) == (140.0, 714.3)  # the median of steps 6 to 8
    assert (bf16["peak_gib"], bf16["predicted_gib"], bf16["gib_of_prediction"]) == (8.0, 8.0, 1.0)
    assert (bf16["tokens_per_s_of_prediction"], bf16["mfu"]) == (0.1429, 0.7)
    assert (bf16["startup"], bf16["state_bytes_per_parameter"]) == ({"imports": 1.5}, 4.2)
    assert bf16["parameters"] == 7 and bf16["losses"] == [7.0 - step for step in range(8)]
    assert (fp8["loss"], fp8["bf16_loss"], fp8["largest_difference"]) == (0.25, 0.0, 0.25)
    assert fp8["wall_speedup"] == 1.0 and "loss" not in bf16


def test_a_run_that_fails_leaves_the_end_of_its_output(train):
    error = train("fp8", 'raise SystemExit("error: torch.OutOfMemoryError")')["error"]
    assert error.endswith("exit code 1 before its first step\nerror: torch.OutOfMemoryError")


def test_the_runner_does_not_cut_a_run_before_its_own_limit(timed):
    row = timed.attempt({"stage": "octavo train", "arm": "new"}, lambda: read_json(unfinished(timed.paths[0])))
    assert row["limit_s"] == 30.0 + LEAST_LIMIT_S
    timed._earlier = [{"stage": "octavo train", "arm": "known", "took_s": 5.0}]
    row = timed.attempt({"stage": "octavo train", "arm": "known"}, lambda: read_json(unfinished(timed.paths[0])))
    assert row["limit_s"] == 30.0 + LEAST_LIMIT_S
