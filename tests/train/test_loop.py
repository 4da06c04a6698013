"""A run: what comes before its first step, what it leaves, and how it stops."""

import json
import os
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from tiny_runs import GPT2, LLAMA, ONE_BLOCK, Recorder, curve, load, make_trainer, recorded, refused_run, terminate
from transformers import AutoModelForCausalLM

from octavo.nn import weights
from octavo.runtime.stopwatch import Stopwatch, timed
from octavo.train import NonFiniteError, RunResult, disk, load_config, loss_scale, parse_config, read_metrics, run
from octavo.train.checkpoint.retention import latest_checkpoint
from octavo.train.config.sections import PrecisionConfig
from octavo.train.diagnose import advice
from octavo.train.record.metrics import read_events
from octavo.train.trainer import Trainer
from support.dispatch_modes import Passing

BERT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.slow
def test_one_process_at_a_time(make_config, tmp_path):
    code = (
        "import sys; from pathlib import Path; from octavo.train.disk import output_folder\n"
        "with output_folder(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        for resume in (False, True):
            refused_run(r"another process is training into .*out", make_config(), tmp_path / "out", resume=resume)
        holder.communicate(timeout=60)
    finally:
        holder.kill()
    assert not (tmp_path / "out").exists() and run(make_config(), out=tmp_path / "out").steps == 6
    assert not (tmp_path / "out" / disk.LOCK).exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "report.html", "layers.json", "tensorboard"])
def test_files_of_the_user_are_not_overwritten(name, make_config, tmp_path):
    (tmp_path / name).write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    for resume in (False, True):
        refused_run(f"{name}.* choose another folder", make_config(), tmp_path, resume=resume)


@pytest.mark.parametrize("level", ["bf16", "fp8"])
def test_a_model_that_cannot_run_a_batch(level, make_config, tmp_path):
    heads = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 3}
    model = {"type": "llama", "config": LLAMA | heads}
    config = make_config(model=model, precision={"level": level}, optim={"micro_batches": 4})
    refused_run(r"the model cannot run a batch of \[1, 16\]: \S", config, tmp_path / "out")


@pytest.mark.parametrize("parameters", ["bf16", "fp32", "fp16"])
def test_a_model_that_sees_later_tokens(parameters, make_config, tmp_path):
    config = make_config(model={"type": "bert", "config": BERT}, precision={"parameters": parameters})
    refused_run(r"BertLMHeadModel is not causal: .*contain the answer", config, tmp_path / "out")
    decoder = {"type": "bert", "config": BERT | {"is_decoder": True}}
    run(make_config(model=decoder, run={"steps": 1}, optim={"warmup": 0}), out=tmp_path / "out")


CAUSAL = [
    {}, {"model": GPT2}, {"data": {"sequence_length": 1}},
    {"precision": {"level": "fp8", "checkpointing": "selective"}},
    {"precision": {"level": "fp8", "recipe": "tensorwise"}},  # one scale for all tokens, the last one included
]  # fmt: skip


@pytest.mark.parametrize("sections", CAUSAL)
def test_a_causal_model_passes_and_is_left_as_it_was(sections, make_config):
    config = make_config(**sections)
    trainer = make_trainer(config)
    trainer.check_causal()
    assert trainer.model.training
    assert not trainer.model.get_input_embeddings()._forward_hooks
    assert all(param.grad is None for param in trainer.model.parameters())


def test_weights_that_are_not_finite(make_config, saved_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(saved_model)
    model.model.norm.weight.data[0] = torch.nan
    model.save_pretrained(saved_model)
    config = make_config(model={"path": str(saved_model)})
    refused_run(r"model\.path = .*: model\.norm\.weight is not finite in bf16", config, tmp_path / "out")


@pytest.mark.parametrize("precision", [{}, {"parameters": "fp16"}, {"master": "remainder"}], ids=str)
def test_masters_take_all_bits_of_a_checkpoint(precision, make_config, saved_model):
    states = {"states": "fp8"} if "master" in precision else {}
    trainer = make_trainer(make_config(model={"path": str(saved_model)}, precision=precision, optim=states))
    exact = dict(AutoModelForCausalLM.from_pretrained(saved_model, dtype=torch.float32).named_parameters())
    params = dict(trainer.model.named_parameters())
    masters = dict(zip(params, trainer.optimizer.masters(), strict=True))
    assert masters.keys() == exact.keys() and all(torch.equal(masters[name], exact[name]) for name in exact)
    rounds = {name: param.detach().float() for name, param in params.items()}
    assert any(not torch.equal(rounds[name], exact[name]) for name in exact)
    if not states:  # those with a remainder are cut off
        assert all(torch.equal(param, exact[name].to(param.dtype)) for name, param in params.items())


def test_sigterm_before_the_first_step(make_config, tmp_path):
    class Early(Recorder):
        def stage(self, text):
            super().stage(text)
            if text == "reading the data":
                terminate()

    result = run(make_config(), out=tmp_path / "out", progress=Early())
    assert (result.stopped, result.steps) == ("sigterm", 0) and RunResult.read(tmp_path / "out") == result
    assert latest_checkpoint(tmp_path / "out") == tmp_path / "out" / "checkpoints" / "step-000000"
    assert run(make_config(), out=tmp_path / "out", resume=True).stopped == "done"
    assert len(read_metrics(tmp_path / "out")) == 6


LATER = (
    "plotly", "datasets", "pandas", "torch.distributed.pipelining", "torch._inductor.compile_fx",
    "torch._inductor.codegen", "octavo.experiments.fit_layout", "octavo.parallel.pipeline",
    "octavo.kernels.launch", "octavo.kernels.gemm.triton", "octavo.kernels.quantize.triton",
)  # fmt: skip
"""What no run on a CPU needs before its first step. Transformers itself imports Dynamo and DTensor."""


def test_stages_add_up_without_gaps(monkeypatch):
    wall, cpu = [100.0], [7.0]
    monkeypatch.setattr(time, "perf_counter", lambda: wall[0])
    monkeypatch.setattr(time, "process_time", lambda: cpu[0])
    watch = Stopwatch()
    for stage, seconds in [("imports", 4.0), ("weights", 2.0), ("resume", 0.01), ("imports", 1.0)]:
        wall[0], cpu[0] = wall[0] + seconds, cpu[0] + 2 * seconds
        watch.lap(stage)
    with timed("kernel probes"):
        wall[0] += 3
    wall[0] += 3
    assert watch.running
    line = watch.finish("first step")
    stages = "imports 5.0, weights 2.0, first step 3.0, kernel probes 3.0"
    assert line == f"first step after 13.0 s (14.0 of CPUs): {stages}, others 0.0"
    assert watch.stages["imports"] == {"wall": 5.0, "cpu": 10.0} and not watch.running


@pytest.mark.thorough
def test_the_command_reaches_its_first_step(make_config, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(make_config(precision={"level": "fp8"}).to_toml())
    before = time.time()
    command = [sys.executable, "-X", "importtime", "-m", "octavo", "train", str(path), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"}, check=True)
    stages = json.loads((tmp_path / "out/run.json").read_text())["startup"]
    ended = read_metrics(tmp_path / "out")[0].time
    assert ended is not None and 0.9 < sum(stage["wall"] for stage in stages.values()) / (ended - before) <= 1
    assert {"imports", "configuration", "data", "weights", "loss head", "optimizer", "first step"} < set(stages)
    until_step, found, _ = done.stderr.partition("note: first step after ")
    assert found, done.stderr[-2000:]
    imported = {line.rpartition("|")[2].strip() for line in until_step.splitlines() if line.startswith("import time:")}
    assert "octavo.train.trainer" in imported and sorted(imported.intersection(LATER)) == []


# --- the loop ---


def test_a_run_learns_and_leaves_everything(make_config, tmp_path):
    config = make_config(run={"steps": 60, "name": "tiny"}, optim={"batch": 8})
    seen = recorded(config, tmp_path / "out")
    result = seen.result
    assert 5.5 < result.losses.first < 6.0 and result.losses.tail_mean < 4.0  # ln 300 = 5.7
    assert (result.name, result.precision, result.device, result.stopped) == ("tiny", "bf16", "cpu", "done")
    assert (result.steps, result.tokens, result.skipped_steps) == (60, 60 * 8 * 16, 0)
    assert result.parameters == 300 * 32 * 2 + 3 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64 + 2 * 32) + 32
    assert set(result.versions) == {"octavo", "torch", "transformers", "python"}
    assert result.converted == ""
    rows = read_metrics(tmp_path / "out")
    assert rows == seen.rows and [row.step for row in rows] == list(range(1, 61))
    assert rows[-1].tokens == result.tokens and result.losses.final == rows[-1].loss
    assert result.wall_s == pytest.approx(sum(row.step_s for row in rows))
    names = {"checkpoints", "config.toml", "metrics.jsonl", "run.json", "setup.json", "tensorboard", "tokenizer.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert RunResult.read(tmp_path / "out") == result
    assert load_config(tmp_path / "out" / "config.toml") == config


def test_mistakes_leave_a_folder_usable(make_config, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "a.txt").write_text("short")
    short = {"sequence_length": 64, "source": str(tmp_path / "a.txt")}
    for sections in ({"data": {"source": "nothing-*.txt"}}, {"model": {"type": "lama"}}, {"data": short}):
        seen = Recorder()
        refused_run(".", make_config(**sections), out, progress=seen)
        assert (seen.stages == []) == ("model" in sections)  # a wrong model shows before the data is prepared
    out.mkdir()
    refused_run(".", make_config(model={"type": "lama"}), out)
    assert run(make_config(), out=out).steps == 6


def test_steps_are_profiled_and_change_nothing(make_config, tmp_path):
    seen = recorded(make_config(run={"steps": 4, "profile": [2, 3]}), tmp_path / "profiled")
    run(make_config(run={"steps": 4}), out=tmp_path / "plain")
    assert curve(tmp_path / "profiled") == curve(tmp_path / "plain")
    table = (tmp_path / "profiled" / "profile.txt").read_text()
    assert table.startswith("2 steps\n") and "aten::mm" in table
    assert json.loads((tmp_path / "profiled" / "profile.json").read_text())["traceEvents"]
    assert any("profiled 2 steps" in note for note in seen.notes)


@pytest.mark.parametrize("level", ["bf16", "fp8"])
def test_a_plain_step_waits_for_the_device_at_its_end_alone(level, make_config):
    """What a GPU has to tell the host: loss and norm, one after the other, when all products are queued."""
    config = make_config(precision={"level": level}, optim={"micro_batches": 2})
    trainer = make_trainer(config)
    trainer.train_step()
    with Passing() as passing:
        trainer.train_step()
    seen = [func.__name__ for func in passing.seen]
    waits = [i for i, name in enumerate(seen) if name.startswith(("_local_scalar_dense", "nonzero", "is_nonzero"))]
    products = [i for i, name in enumerate(seen) if name.startswith(("mm", "addmm", "scaled_mm", "_scaled_mm"))]
    assert len(waits) == 2 and waits[0] > products[-1] and len(products) > 20


@pytest.mark.thorough
def test_kept_weights_are_quantized_once_per_step_and_change_no_loss(make_config, tmp_path):
    casts = {}
    for keep, steps in ((False, 4), (True, 4), (True, 3)):
        config = make_config(
            run={"steps": steps}, optim={"micro_batches": 4}, model=ONE_BLOCK,
            precision={"level": "fp8", "recipe": "rowwise", "keep_weights": keep},
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            cast = Mock(wraps=weights._cast)
            patch.setattr(weights, "_cast", cast)
            run(config, out=tmp_path / f"{keep}{steps}")
        casts[keep, steps] = cast.call_count
    assert casts[False, 4] == 0
    assert casts[True, 4] - casts[True, 3] == 7 * 2  # once for a step's micro-batches, and once to check
    without, kept = (read_metrics(tmp_path / f"{keep}4") for keep in (False, True))
    assert [(row.loss, row.grad_norm) for row in kept] == [(row.loss, row.grad_norm) for row in without]


def test_a_loss_scale_of_a_power_of_two_changes_nothing(make_config, tmp_path):
    rows = {}
    for scale in ("none", 1024.0):
        run(make_config(precision={"loss_scale": scale}), out=tmp_path / str(scale))
        rows[scale] = [(row.loss, row.grad_norm) for row in read_metrics(tmp_path / str(scale))]
        assert {row.loss_scale for row in read_metrics(tmp_path / str(scale))} == {None if scale == "none" else scale}
    assert rows["none"] == rows[1024.0]


def change_trainers(monkeypatch, change):
    """Trainers that are changed as soon as they are made."""
    make = Trainer.__init__
    monkeypatch.setattr(Trainer, "__init__", lambda self, *args, **named: make(self, *args, **named) or change(self))


def spoil(monkeypatch, name, steps, factor):
    def change(trainer):
        def hook(module, inputs, output):
            return output * factor if trainer.step in steps and torch.is_grad_enabled() else None

        trainer.model.get_submodule(name).register_forward_hook(hook)

    change_trainers(monkeypatch, change)


def test_overflow_under_dynamic_scaling_skips_the_step_and_says_so(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(loss_scale, "INITIAL_SCALE", 2.0**22)  # gradients of fp16 end at 65504: it has to come down
    precision = {"parameters": "fp16", "loss_scale": "dynamic"}
    seen = recorded(make_config(run={"steps": 30}, precision=precision, optim={"lr": 3e-3}), tmp_path)
    result = seen.result
    skipped = [row for row in seen.rows if row.skipped]
    assert result.skipped_steps == len(skipped) > 0 and result.steps == 30
    assert seen.rows[:2] == skipped[:2] and (skipped[0].loss_scale, skipped[0].grad_norm) == (2.0**22, None)
    for row, following in pairwise(seen.rows):
        assert following.loss_scale == (row.loss_scale / 2 if row.skipped else row.loss_scale)
    notes = [note for note in seen.notes if "skipped" in note]
    assert notes[0].startswith("step 1 skipped: the gradient overflowed at loss scale 4.1943e+06 (next 2.09")
    assert len(notes) == len(skipped) and not seen.rows[-1].skipped
    assert result.losses.final < result.losses.first


def test_a_skipped_step_leaves_parameters_as_they_were(make_config, monkeypatch):
    spoil(monkeypatch, "model.layers.1", {0}, torch.inf)
    config = make_config(precision={"loss_scale": 8.0})
    trainer = make_trainer(config)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    row = trainer.train_step()
    assert row.skipped
    assert (row.loss, row.grad_norm, row.loss_scale) == (None, None, 8.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items())
    assert not trainer.train_step().skipped
    assert not torch.equal(before["lm_head.weight"], trainer.model.lm_head.weight)


@pytest.mark.thorough
def test_a_non_finite_loss_stops_with_the_layer_named(make_config, tmp_path, monkeypatch):
    config, module = make_config(precision={"level": "fp8"}), "model.layers.2.self_attn.q_proj"
    spoil(monkeypatch, module, {3}, torch.inf)
    with pytest.raises(NonFiniteError, match=f"output of {module}") as caught:
        run(config, out=tmp_path)
    assert caught.value.step == 4 and str(caught.value).startswith("step 4: the loss is nan")
    assert "optim.lr" in str(caught.value) and "precision.skip" in str(caught.value)
    result = RunResult.read(tmp_path)
    assert (result.stopped, result.steps) == ("non-finite", 3) and len(read_metrics(tmp_path)) == 3
    # The state before the failing step is saved, and is a state to go on from.
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]
    monkeypatch.undo()
    assert run(config, out=tmp_path, resume=True).steps == 6
    run(config, out=tmp_path / "clean")
    assert curve(tmp_path) == curve(tmp_path / "clean")


def test_a_failure_leaves_the_checkpoints_before_it(make_config, tmp_path, monkeypatch):
    spoil(monkeypatch, "model.layers.1", {4, 5}, torch.inf)
    config = make_config(run={"save_every": 3, "keep": 1}, precision={"loss_scale": "none"})
    with pytest.raises(NonFiniteError) as caught:
        run(config, out=tmp_path)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000003", "step-000004"]
    message = str(caught.value)
    assert re.search(r"Resume \S*step-000004 \(--resume\) with a lower optim\.lr or optim\.clip", message)
    assert re.search(r"Where that fails again, remove \S*step-000004 to resume \S*step-000003$", message)


DIVERGING = {"lr": 1e30, "warmup": 0, "clip": 0.0}
DIVERGED = [
    (DIVERGING, 0, "No checkpoint was saved: run anew .*optim.weight_decay"),
    (DIVERGING, 1, "No checkpoint is left.* weights of .*01 have diverged. Run anew"),
    ({"lr": 1e39, "warmup": 0, "schedule": "constant"}, 1,
     r"step 1: its update was not finite; .* parameter model\..*No checkpoint was saved: run anew with a lower"),
]  # fmt: skip


@pytest.mark.parametrize(("optim", "save_every", "message"), DIVERGED)
def test_weights_that_have_diverged_are_nothing_to_go_on_from(optim, save_every, message, make_config, tmp_path):
    with pytest.raises(NonFiniteError, match=message):
        run(make_config(optim=optim, run={"save_every": save_every}), out=tmp_path)
    assert (latest_checkpoint(tmp_path) is None) == ("No checkpoint was saved" in message)
    assert RunResult.read(tmp_path).stopped == "non-finite"


def test_advice_names_the_checkpoint_before():
    text = advice([Path("a")], [Path("b")], PrecisionConfig(), converted=False, scales_loss=False)
    assert text.startswith("Remove b, whose weights have diverged, and resume a (--resume) with a lower optim.lr")


def test_a_non_finite_gradient_stops_with_the_layer_named(make_config, tmp_path, monkeypatch):
    def change(trainer):
        weight = trainer.model.model.layers[1].input_layernorm.weight
        weight.register_hook(lambda grad: grad * torch.inf if trainer.step == 2 else grad)

    change_trainers(monkeypatch, change)
    with pytest.raises(NonFiniteError, match=r"gradient of model\.layers\.1\.input_layernorm\.weight") as caught:
        run(make_config(), out=tmp_path)
    assert str(caught.value).startswith("step 3: the gradient is not finite")


def test_scaling_that_never_recovers_stops(make_config, tmp_path, monkeypatch):
    spoil(monkeypatch, "model.layers.0", set(range(1, 1000)), torch.nan)
    config, seen = make_config(run={"steps": 100}, precision={"loss_scale": "dynamic"}), Recorder()
    with pytest.raises(NonFiniteError, match=r"output of model\.layers\.0"):
        run(config, out=tmp_path, progress=seen)
    assert RunResult.read(tmp_path).skipped_steps == 40
    assert {row.loss_scale for row in seen.rows} == {loss_scale.INITIAL_SCALE}
    assert "step 2 skipped: the loss is not finite, which no loss scale changes (loss scale 65536 stays)" in seen.notes


@pytest.mark.parametrize("precision", [{}, {"parameters": "fp16", "loss_scale": 1e-9}])
def test_a_gradient_that_is_exactly_zero_stops_the_run(precision, make_config, tmp_path, monkeypatch):
    if not precision:
        spoil(monkeypatch, "model.norm", {2}, 0.0)
    with pytest.raises(NonFiniteError, match=r"the gradient is exactly zero in every parameter.*nothing is learned"):
        run(make_config(precision=precision), out=tmp_path)
    assert RunResult.read(tmp_path).stopped == "non-finite"


@pytest.mark.parametrize(
    ("keys", "folder"),
    [({"name": "first"}, "runs/first"), ({"out": "elsewhere"}, "elsewhere"), ({"out": "~/runs/one"}, "home/runs/one")],
)
def test_the_folder_is_that_of_the_run_or_named_after_it(keys, folder, make_config, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    run(make_config(run=keys | {"steps": 1}, optim={"warmup": 0}))
    assert [path.parent for path in tmp_path.rglob("run.json")] == [tmp_path / folder]
    assert not (tmp_path / "~").exists()


def test_an_fp8_run_says_what_became_of_each_layer(make_config, tmp_path):
    run(make_config(precision={"level": "fp8", "skip": ["*.v_proj"]}), out=tmp_path / "fp8")
    rows = {row["name"]: row for row in json.loads((tmp_path / "fp8" / "layers.json").read_text())}
    assert rows["model.layers.0.self_attn.q_proj"]["recipe"] == "rowwise"
    assert rows["model.layers.0.self_attn.v_proj"]["reason"] == "skipped by pattern '*.v_proj'"


def test_epochs_instead_of_steps(make_config, tmp_path):
    config = make_config()
    tables = config.model_dump(exclude_none=True)
    rows = load(config).windows
    del tables["run"]["steps"]
    tables["run"]["epochs"] = 10 / rows
    result = run(parse_config(tables), out=tmp_path)
    assert result.steps == 3  # of 4 sequences
    assert load_config(tmp_path / "config.toml").run.steps == 3
    assert run(parse_config(tables), out=tmp_path, resume=True).steps == 3
    tables["run"]["epochs"] = 4 / rows
    refused_run("optim.warmup = 2 is not below run.steps = 1", parse_config(tables), tmp_path / "short")


def test_a_dry_run_keeps_nothing(make_config, tmp_path):
    config, out = make_config(run={"save_every": 1}), tmp_path / "out"
    assert run(config, out=out, dry_run=True).steps == 1 and not out.exists()
    run(config, out=out)
    files = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    refused_run("already holds a run", config, out, dry_run=True)
    assert run(make_config(run={"steps": 9}), out=out, dry_run=True, resume=True).steps == 1
    assert files == {path: path.stat().st_mtime_ns for path in out.rglob("*")}


def test_an_evaluation_before_the_first_step(make_config, tmp_path):
    config = make_config(eval={"first": True, "batches": 1}, run={"steps": 3})
    run(config, out=tmp_path / "a")
    (event,) = read_events(tmp_path / "a")
    assert event["step"] == 0 and re.fullmatch(r"held out, before the first step: loss \d\.\d{4}", event["text"])
    run(config, out=tmp_path / "a", resume=True)
    assert read_events(tmp_path / "a") == [event]


def test_batches_are_read_while_the_device_computes(make_config, monkeypatch):
    """Each once, the next one before the loss is read; what is wrong with one is raised in its own step."""
    config = make_config(run={"steps": 4})
    trainer = make_trainer(config)
    plain = make_trainer(config)
    monkeypatch.setattr(plain, "_read_ahead", lambda: None)
    events = []
    failures = [OSError("not yet")]
    batch, item = trainer.task.data.batch, torch.Tensor.item

    def read(seed, step, size):
        events.append(step)
        if step == 2 and failures:
            raise failures.pop()
        return batch(seed, step, size)

    monkeypatch.setattr(trainer.task.data, "batch", read)
    monkeypatch.setattr(torch.Tensor, "item", lambda self: (events.append("read"), item(self))[1])
    for step in range(4):
        loss = trainer.train_step().loss
        ahead = [step + 1] if step < 3 else []
        first = {0: [0], 2: [2]}.get(step, [])  # number 2 failed in the step before
        assert [event for event in events if event != "read"] == [*first, *ahead]
        assert events.index(step + 1) < events.index("read") if ahead else True
        events.clear()
        assert plain.train_step().loss == loss
        events.clear()
