"""Samples: what greedy decoding gives, the same on any ranks, and no trace of them in training."""

import pytest
import torch
from tiny_runs import Recorder, make_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo.train import ConfigError, read_metrics, run
from octavo.train.checkpoint.retention import latest_checkpoint
from octavo.train.sampling import Sampler

SAMPLE = {"every": 4, "prompts": ["the leaf", "", "a printer cuts"], "tokens": 6}


def samples(out):
    return {row.step: row.samples for row in read_metrics(out) if row.samples is not None}


@pytest.mark.thorough
@pytest.mark.parametrize("case", [{}, {"packing": "documents"}], ids=str)
def test_greedy_samples_are_those_of_generate(case, make_config, tmp_path):
    seen = Recorder()
    config = make_config(sample=SAMPLE, precision={"parameters": "fp32"}, data=case, run={"steps": 30})
    run(config, out=tmp_path, progress=seen)
    written = samples(tmp_path)
    assert list(written) == [*range(4, 30, 4), 30] and seen.rows[-1].samples == written[30]
    assert [sample["prompt"] for sample in written[30]] == SAMPLE["prompts"]
    folder = latest_checkpoint(tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for sample in written[30]:
        ids = tokenizer(sample["prompt"] or tokenizer.eos_token, return_tensors="pt", return_token_type_ids=False)
        with torch.autocast("cpu", torch.bfloat16):
            whole = model.generate(**ids, max_new_tokens=6, do_sample=False, pad_token_id=tokenizer.eos_token_id)
        start = len(tokenizer.decode(ids["input_ids"][0]))
        assert sample["text"] == tokenizer.decode(whole[0]).removesuffix(tokenizer.eos_token)[start:]
    assert any(sample["text"] for sample in written[30])


def test_a_sample_longer_than_a_sequence(make_config, tmp_path):
    config = make_config(sample={"prompts": ["the leaf folds"], "tokens": 15})
    with pytest.raises(ConfigError, match=r"sample.tokens = 15 after a prompt of \d+ tokens exceeds .* = 16, beyond"):
        run(config, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_each_step_draws_its_own_samples(make_config):
    trainer = make_trainer(make_config(sample={"prompts": ["the "], "tokens": 6, "temperature": 1.0}))
    first, again = (Sampler(trainer).write() for _ in range(2))
    trainer.step = 1
    assert first == again != Sampler(trainer).write()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1e-40, 5e-324])
def test_a_model_that_has_diverged_ends_no_run(temperature, make_config, monkeypatch):
    config = make_config(sample={"prompts": ["the "], "tokens": 2, "temperature": temperature})
    trainer = make_trainer(config)
    for value in (float("inf"), float("-inf"), float("nan"), 3e38, 1.0):
        logits = torch.tensor([value, 2.0, -3e38, *[0.5] * 297]).expand(1, 16, 300)
        monkeypatch.setattr(trainer, "logits", lambda ids, logits=logits: logits[:, : ids.shape[1]])
        assert Sampler(trainer).write()[0]["prompt"] == "the "
