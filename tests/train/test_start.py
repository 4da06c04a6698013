"""What is found out before a run's first step, and what it leaves in the folder then."""

import subprocess
import sys

import pytest
import torch
from tiny_runs import GPT2, LLAMA, Recorder, make_trainer, terminate
from transformers import AutoModelForCausalLM

from octavo.train import RunResult, disk, read_metrics, run
from octavo.train.checkpoint.retention import latest_checkpoint
from octavo.train.config.run_config import ConfigError
from octavo.train.data.load import load_corpus
from octavo.train.model import build_model
from octavo.train.record.progress import NullProgress

BERT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def checkpoint(make_config, tmp_path):
    """A local fp32 checkpoint with its tokenizer."""
    config = make_config(precision={"parameters": "fp32"})
    tokenizer = load_corpus(config.data, config.model, NullProgress()).tokenizer
    model = build_model(config, tokenizer)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    return tmp_path / "model"


def spoil(folder, name):
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_parameter(name)[0] = torch.nan
    model.save_pretrained(folder)


@pytest.mark.slow
def test_one_process_at_a_time(make_config, tmp_path):
    code = (
        "import sys; from pathlib import Path; from octavo.train.disk import output_folder\n"
        "with output_folder(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        for resume in (False, True):
            with pytest.raises(ConfigError, match=r"another process is training into .*out"):
                run(make_config(), out=tmp_path / "out", resume=resume)
        holder.communicate(timeout=60)
    finally:
        holder.kill()
    assert not (tmp_path / "out").exists()
    assert run(make_config(), out=tmp_path / "out").steps == 6
    assert not (tmp_path / "out" / disk.LOCK).exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "report.html", "layers.json", "tensorboard"])
def test_files_of_the_user_are_not_overwritten(name, make_config, tmp_path):
    (tmp_path / name).write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    for resume in (False, True):
        with pytest.raises(ConfigError, match=f"{name}.* choose another folder"):
            run(make_config(), out=tmp_path, resume=resume)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "mine", "notes.txt": "mine"}


@pytest.mark.parametrize("level", ["bf16", "fp8"])
def test_a_model_that_cannot_run_a_batch(level, make_config, tmp_path):
    heads = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 3}
    model = {"type": "llama", "config": LLAMA | heads}
    with pytest.raises(ConfigError, match=r"the model cannot run a batch of \[1, 16\]: \S"):
        run(make_config(model=model, precision={"level": level}, optim={"micro_batches": 4}), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("parameters", ["bf16", "fp32", "fp16"])
def test_a_model_that_sees_later_tokens(parameters, make_config, tmp_path):
    config = make_config(model={"type": "bert", "config": BERT}, precision={"parameters": parameters})
    with pytest.raises(ConfigError, match=r"BertLMHeadModel is not causal: .*contain the answer"):
        run(config, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    run(make_config(model={"type": "bert", "config": BERT | {"is_decoder": True}}), out=tmp_path / "out")


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


def test_remainders_take_all_bits_of_a_checkpoint(make_config, checkpoint):
    sections = {"precision": {"master": "remainder"}, "optim": {"states": "fp8"}}
    config = make_config(model={"path": str(checkpoint)}, **sections)
    trainer = make_trainer(config)
    exact = dict(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).named_parameters())
    states = {id(param): state for param, state in trainer.optimizer.inner.state.items()}
    for name, param in trainer.model.named_parameters():
        upper = param.detach().view(torch.int16).int() << 16
        assert torch.equal((upper + states[id(param)]["remainder"].int()).view(torch.float32), exact[name]), name


def test_weights_that_are_not_finite(make_config, checkpoint, tmp_path):
    spoil(checkpoint, "model.norm.weight")
    with pytest.raises(ConfigError, match=r"model\.path = .*: model\.norm\.weight is not finite in bf16"):
        run(make_config(model={"path": str(checkpoint)}), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("parameters", ["bf16", "fp16"])
def test_masters_take_all_bits_of_a_checkpoint(parameters, make_config, checkpoint):
    config = make_config(model={"path": str(checkpoint)}, precision={"parameters": parameters})
    trainer = make_trainer(config)
    exact = dict(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).named_parameters())
    masters = trainer.optimizer.state_dict()["masters"]
    assert masters.keys() == exact.keys()
    assert all(torch.equal(masters[name], exact[name]) for name in exact)
    rounded = dict(trainer.model.named_parameters())
    assert all(torch.equal(param, exact[name].to(param.dtype)) for name, param in rounded.items())
    assert any(not torch.equal(rounded[name].float(), exact[name]) for name in exact)


def test_sigterm_before_the_first_step(make_config, tmp_path):
    class Early(Recorder):
        def stage(self, text):
            super().stage(text)
            if text == "reading the data":
                terminate()

    result = run(make_config(), out=tmp_path / "out", progress=Early())
    assert (result.stopped, result.steps) == ("sigterm", 0)
    assert RunResult.read(tmp_path / "out") == result
    assert latest_checkpoint(tmp_path / "out") == tmp_path / "out" / "checkpoints" / "step-000000"
    assert run(make_config(), out=tmp_path / "out", resume=True).stopped == "done"
    assert len(read_metrics(tmp_path / "out")) == 6
