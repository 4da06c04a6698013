"""What comes before the first step: checks of the folder, the model and the data, and how long it takes."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from tiny_runs import GPT2, LLAMA, Recorder, make_trainer, refused_run, terminate
from transformers import AutoModelForCausalLM

from octavo.runtime.stopwatch import Stopwatch, timed
from octavo.train import RunResult, disk, read_metrics, run
from octavo.train.checkpoint.retention import latest_checkpoint

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


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": GPT2},
        {"precision": {"level": "fp8", "recipe": "tensorwise"}},  # one scale for all tokens, the last one included
        {"precision": {"checkpointing": "selective", "level": "fp8"}},
        {"data": {"sequence_length": 1}},
    ],
)
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
