"""The command line, run in-process: what it says, its exit codes, and what it leaves on disk."""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import pytest
from fake_runs import operand, sample
from hypothesis import given
from hypothesis import strategies as st

from octavo._version import __version__
from octavo.experiments.demo import demo_configs
from octavo.experiments.progress_bars import ProgressBars
from octavo.numerics.display import shortened
from octavo.runtime import terminal
from support.command import octavo, refused

ROOT = Path(__file__).parents[2]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def config(here, make_config):
    """A tiny run's configuration, in the working directory."""
    path = here / "tiny.toml"
    path.write_text(make_config(run={"steps": 4}).to_toml())
    return path


@pytest.fixture
def tiny_demo(text_files, cache):
    """Settings of a tiny demo."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes = [f"model.config.{name}={size}" for name, size in (sizes | {"num_key_value_heads": 2}).items()]
    data = [f"data.source={text_files}/*.txt", f"data.cache={cache}", "data.sequence_length=32", "data.vocab_size=300"]
    return [*sizes, *data, "run.device=cpu", "optim.batch=2"]


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("trian", ["trian", "'train'"]),
        ("train nowhere.toml", ["nowhere.toml"]),
        *((f"doctor --device {device}", ["device", "cpu"]) for device in ("gpu", "cpu:x", "meta", "''")),
        ("demo --recip rowwise", ["--recip", "--recipe"]),
        ("demo --recipe rowise", ["rowise", "'rowwise'"]),
        ("demo --steps 0", ["run.steps"]),
        ("demo --device gpu", ["run.device", "gpu"]),
        ("demo precision.level=fp8", ["precision.level", "--level", "octavo train"]),
        ("demo --level fp8+activation", ["fp8+activation", "'fp8+activations'"]),
        ("demo --level bf16", ["bf16", "--level"]),
        ("demo optim.warmpu=1", ["optim.warmpu", "'warmup'"]),
        ("inspect ~/x", ["home/x"]),
        ("export ~/x ~/y", ["home/x"]),
        ("train ~/x", ["home/x"]),
        ("compare --losses ~/x", ["home/x"]),
        ("export x ~nouser/y", ["no such home directory"]),
    ],
)
def test_a_mistake_is_named_with_what_is_nearest(here, monkeypatch, command, words):
    monkeypatch.setenv("HOME", str(here / "home"))
    refused(octavo(*shlex.split(command)), *words)
    assert list(here.iterdir()) == []


def test_a_wrong_setting_is_named_and_leaves_no_folder(config, here):
    refused(octavo("train", config, "model.type=lama", "--out", "out"), "lama", "'llama'")
    assert not (here / "out").exists()


def test_a_loss_that_is_not_finite_is_a_failed_run(config, here):
    result = octavo("train", config, "optim.lr=1e38", "optim.clip=0", "--out", "out")
    assert result.exit_code == 1
    assert "error:" in result.stderr and "not finite" in result.stderr and "Traceback" not in result.output
    assert json.loads((here / "out/run.json").read_text())["stopped"] == "non-finite"
    assert (here / "out/report.html").exists()


def test_the_demo_config_is_in_the_package_and_in_configs():
    packaged = (resources.files("octavo.experiments") / "demo.toml").read_bytes()
    assert packaged == (ROOT / "configs/demo.toml").read_bytes()
    assert tomllib.loads(packaged.decode())["run"]["name"] == "demo"


@pytest.mark.thorough
def test_a_demo_compares_both_arms(here, tiny_demo):
    result = octavo("demo", *tiny_demo, "--steps", 12, "--seed", 3, "--recipe", "tensorwise", "--out", "out")
    level = "fp8+activations+optimizer"
    assert result.exit_code == 0, result.output
    content = json.loads((here / "out/verdict.json").read_text())
    (verdict,), (bf16, fp8) = content["verdicts"], content["runs"]
    assert (bf16["precision"], fp8["precision"]) == ("bf16", f"{level} tensorwise")
    assert verdict["tail_gap"] == fp8["losses"]["tail_mean"] - bf16["losses"]["tail_mean"] != 0
    assert fp8["losses"]["first"] == pytest.approx(bf16["losses"]["first"], rel=0.02)  # one start, one batch
    assert fp8["saved_bytes_per_token"] < bf16["saved_bytes_per_token"]
    assert bf16["state_bytes_per_parameter"] == pytest.approx(12, abs=0.01)  # the step counts are beside
    assert 4 < fp8["state_bytes_per_parameter"] < 4.5
    assert verdict["state_ratio"] == fp8["state_bytes_per_parameter"] / bf16["state_bytes_per_parameter"]
    assert 1.05 < verdict["prediction"]["gain"] < 1.6 and "Llama 3 8B on 8 × H100" in verdict["prediction"]["where"]
    assert bf16["steps"] == fp8["steps"] == 12
    shown = " ".join(result.stdout.split())
    assert verdict["sentence"] in shown and all(note in shown for note in verdict["notes"])
    for number in (bf16["losses"]["final"], fp8["losses"]["tail_mean"]):
        assert f"{number:.4f}" in shown
    left = files(here / "out")
    assert {"report.html", "bf16/metrics.jsonl", f"{level}/metrics.jsonl"} <= set(left)
    configs = [tomllib.loads(left[f"{arm}/config.toml"].decode()) for arm in ("bf16", level)]
    assert [c["precision"].pop("level") for c in configs] == ["bf16", level]
    assert configs[0] == configs[1] and configs[0]["run"]["seed"] == 3


def test_a_demo_overwrites_nothing(here):
    (here / "out").mkdir()
    (here / "out/notes.txt").write_text("mine")
    refused(octavo("demo", "--out", "out"), "out", "not empty", "--out")
    assert files(here) == {"out/notes.txt": b"mine"}


@pytest.mark.parametrize(
    ("overrides", "warmup"),
    [
        ([], 10), (["run.steps=11"], 10), (["run.steps=10"], 5), (["run.steps=1"], 0),
        (["run.steps=4", "optim.warmup=1"], 1), (["optim.warmup=3"], 3),
    ],
)  # fmt: skip
def test_the_warmup_of_a_demo_fits_its_steps(overrides, warmup):
    assert {config.optim.warmup for config in demo_configs(overrides)} == {warmup}


def test_a_stopped_demo_says_how_to_go_on(here, tiny_demo, monkeypatch):
    monkeypatch.setattr(ProgressBars, "step", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    result = octavo("demo", *tiny_demo, "--steps", 4, "--out", "my out")
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert result.exit_code == 0
    assert "warms up over 2 of the 4 steps" in result.stderr
    line = result.stdout.splitlines()[-1].strip()
    assert line == "octavo train 'my out/bf16/config.toml' --out 'my out/bf16' --resume"
    assert octavo(*shlex.split(line)[1:]).exit_code == 0
    assert json.loads((here / "my out/bf16/run.json").read_text())["steps"] == 4


def test_doctor_says_what_runs_here():
    result = octavo("doctor", "--device", "cpu")
    assert result.exit_code == 0
    shown = " ".join(result.stdout.split())
    for words in ("scaled_mm", "quantize", "reference", "torch_scaled:", __version__, "emulated", "no speed-up"):
        assert words in shown


def test_doctor_as_json_holds_every_backend_with_its_reason():
    content = json.loads(octavo("doctor", "--device", "cpu", "--json").stdout)
    assert content["device"] == "cpu" and content["native_recipes"] == []
    assert {"octavo", "python", "torch", "triton", "transformers"} <= set(content["versions"])
    ops = {row["op"] for row in content["ops"]}
    for op in ops:
        rows = [row for row in content["ops"] if row["op"] == op]
        assert sum(row["chosen"] for row in rows) == 1
        assert all(row["serves"] == (row["reason"] == "") for row in rows)
    assert any(op.startswith("scaled_mm") for op in ops)


@pytest.fixture
def interpreted():
    """Triton's kernels run in its interpreter here."""
    pytest.importorskip("triton")
    from octavo.kernels.launch import INTERPRETED

    if not INTERPRETED:
        pytest.skip("kernels run on the GPU here")


@pytest.mark.usefixtures("interpreted")
def test_doctor_deep_compares_kernels_in_the_interpreter():
    arguments = ("doctor", "--deep", "--device", "cpu", "--seconds", 0, "--only", "quantize e4m3/tensor fold=none")
    result = octavo(*arguments)
    assert result.exit_code == 0, result.output
    assert "0: 1 ok" in result.stdout and "3 runs on cpu, seed 0: all bytes are equal." in result.stdout
    content = json.loads(octavo(*arguments, "--json").stdout)
    assert [(o["op"], o["config"], o["mismatches"]) for o in content["outcomes"]][:1] == [("quantize", 0, 0)]


@pytest.mark.usefixtures("interpreted")
def test_doctor_deep_says_what_a_difference_is_and_fails(monkeypatch):
    from octavo.kernels.quantize import reference

    monkeypatch.setattr(reference, "SMALLEST_SCALE", 1.0)  # a reference that the kernels do not equal
    result = octavo("doctor", "--deep", "--device", "cpu", "--seconds", 0, "--only", "quantize e4m3/tensor fold=none")
    assert result.exit_code == 1
    assert "differ" in result.stdout and "expected" in result.stdout


@pytest.mark.thorough
def test_doctor_deep_without_a_gpu_says_what_to_do():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "octavo", "doctor", "--deep", "--device", "cpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert "doctor --deep: Triton" in done.stderr and ("GPU" in done.stderr or "pip install" in done.stderr)


@pytest.mark.usefixtures("interpreted")
def test_doctor_deep_refuses_a_case_it_does_not_know():
    refused(octavo("doctor", "--deep", "--device", "cpu", "--only", "quantise"), "quantise", "quantize_pair")


def test_sigterm_saves_and_is_a_success(config, here, monkeypatch):
    monkeypatch.setattr(ProgressBars, "step", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    result = octavo("train", config, "--out", "out")
    assert result.exit_code == 0 and "Stopped and saved after 1 step." in result.stdout, result.output
    assert json.loads((here / "out/run.json").read_text())["stopped"] == "sigterm"


# --- octavo inspect ---


@pytest.fixture
def looked(tmp_path):
    """Two sampled steps of three layers; in the second one is bad."""
    for step, level in ((50, 31.0), (100, 12.0)):
        good = [operand(step, f"model.layers.0.mlp.{name}") for name in ("up_proj", "gate_proj")]
        sample(tmp_path, *good, operand(step, "model.layers.0.mlp.down_proj", sqnr=level, underflow=0.125))
    return tmp_path


def inspect(*arguments, columns=120):
    return octavo("inspect", *arguments, COLUMNS=str(columns))


def test_the_last_step_worst_first(looked):
    result = inspect(looked)
    assert result.exit_code == 0
    assert "1 figure crossed a limit in 2 sampled steps." in result.stdout
    assert "step 100: model.layers.0.mlp.down_proj x: SQNR 12.0 dB (limit 18)" in result.stdout
    assert "step 100: 3 of 3, worst sqnr first (rowwise)" in result.stdout
    lines = [line for line in result.stdout.splitlines() if "_proj" in line][1:]
    assert lines[0].split()[:5] == ["model.layers.0.mlp.down_proj", "x", "12.0", "30.5", "12.500%"]
    assert len(lines) == 3
    assert "saturation" not in result.stdout  # nothing was


def test_a_checkpoint_knows_what_was_before_it(looked):
    result = inspect(looked / "checkpoints" / "step-000070")
    assert "No figures crossed a limit in 1 sampled step." in result.stdout
    assert "step 50: 3 of 3" in result.stdout


def test_json_holds_all_rows_of_a_step(looked):
    sample(looked, operand(150, sqnr=math.nan, nonfinite=2))
    assert "not finite" in inspect(looked).stdout
    (row,) = json.loads(inspect(looked, "--json").stdout, parse_constant=pytest.fail)
    assert (row["step"], row["sqnr"], row["nonfinite"]) == (150, None, 2)


def test_mistakes(looked):
    refused(inspect(looked, "--step", 60), "step 60 was not sampled; the nearest that was is 50 (--step 50)")
    refused(inspect(looked, "--by", "sqn"), "--by sqn: no such order (did you mean 'sqnr'?)")


LONG = "model.language_model.layers.17.self_attn.some_long_projection_name"


def test_names_are_whole_in_a_pipe_and_keep_both_ends_in_a_terminal(looked, monkeypatch):
    others = {name: 20.0 for name in ("mxfp8", "tensorwise", "rowwise_hp_wgrad", "blockwise")}
    sample(looked, operand(150, LONG, what_if=others, saturation=0.5, sqnr=31.5))
    piped = inspect(looked, columns=40).stdout
    (line,) = [line for line in piped.splitlines() if LONG in line and "31.5" in line]
    assert "50.000%" in line and "2^3" in line
    monkeypatch.setattr(terminal, "_is_terminal", lambda: True)
    shown = inspect(looked, columns=80).stdout
    (line,) = [line for line in shown.splitlines() if "31.5" in line]
    assert line.lstrip().startswith("model.l…ion_name") and "50.000%" in line and "2^3" in line
    assert all(f"{name}?" in shown for name in others)


@given(name=st.text(min_size=1, max_size=90), width=st.integers(3, 90))
def test_a_shortened_name_fits_and_keeps_its_ends(name, width):
    short = shortened(name, width)
    assert len(short) <= width and short[0] == name[0] and short[-1] == name[-1]
    assert (short == name) == (len(name) <= width) or "…" in name
