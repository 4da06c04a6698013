"""Held-out text and samples: the same loss as a plain loop, runs that end early, and no trace of them in training."""

import pytest
import tiny_runs
import torch
import torch.nn.functional as F
from tiny_runs import Recorder, assert_no_trace, load, make_trainer, put_texts, recorded, sentences, slow, terminate
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo.experiments.compare_runs import make_arms
from octavo.train import ConfigError, RunResult, loop, read_metrics, run
from octavo.train.checkpoint.retention import latest_checkpoint
from octavo.train.evaluation import Patience
from octavo.train.ranks import Ranks
from octavo.train.sampling import Sampler
from octavo.train.trainer import Trainer


def texts(loaded):
    stream = loaded._read(0, loaded.tokens, loaded._ids).tolist()
    return str(loaded.tokenizer.backend.decode(stream, skip_special_tokens=False)).split("<|endoftext|>")[:-1]


def test_documents_are_trained_on_or_held_out(make_config, tmp_path):
    lines = [*sentences(200).splitlines(), *["the same line, many times over"] * 30]
    settings = {"source": put_texts(tmp_path / "a.jsonl", lines), "shuffle": False}
    loaded = load(make_config(data=settings, eval={"fraction": 0.2}))
    held_out = loaded.held_out
    assert held_out is not None
    trained, tested = texts(loaded), texts(held_out)
    assert sorted(trained + tested) == sorted(lines) and not {*trained} & {*tested}
    assert 46 <= len(tested) <= 46 + 30 and loaded.documents == len(trained)
    again = load(make_config(data=settings, eval={"fraction": 0.2}, run={"seed": 9}))
    assert again.fingerprint == loaded.fingerprint and texts(again) == trained
    less = load(make_config(data=settings, eval={"fraction": 0.1}))
    assert {*texts(less.held_out)} < {*tested} and less.fingerprint != loaded.fingerprint
    whole = load(make_config(data=settings))
    assert whole.held_out is None and whole.fingerprint not in (loaded.fingerprint, less.fingerprint)
    # The windows are those of a file that never had the others.
    (tmp_path / "only").mkdir()
    vocabulary = tmp_path / "tokenizer"
    loaded.tokenizer.save(vocabulary)
    only = {"source": put_texts(tmp_path / "only" / "a.jsonl", trained), "shuffle": False, "tokenizer": str(vocabulary)}
    expected, actual = load(make_config(data=only)), loaded
    assert actual.windows == expected.windows
    for step in range(3):
        for a, b in zip(actual.batch(0, step, 7), expected.batch(0, step, 7), strict=True):
            assert torch.equal(a, b)


def test_what_one_source_holds_out_no_other_trains_on(make_config, tmp_path):
    """Of two sources with documents in common the smallest hashes of each are others."""
    both, more = sentences(20).splitlines(), sentences(60, seed=1).splitlines()
    paths = [put_texts(tmp_path / "a.jsonl", both), put_texts(tmp_path / "b.jsonl", [*both, *more])]
    sources = [{"source": path, "weight": 1} for path in paths]
    loaded = load(make_config(data={"source": "", "sources": sources}, eval={"fraction": 0.3}))
    alone = [load(make_config(data={"source": path}, eval={"fraction": 0.3})) for path in paths]
    trained = {text for part in loaded._parts for text in texts(part)}
    held_out = {text for part in loaded._parts for text in texts(part.held_out)}
    assert trained | held_out == {*both, *more} and not trained & held_out
    assert held_out == {text for part in alone for text in texts(part.held_out)}
    assert {*texts(alone[0])} & held_out  # which that source alone trains on


def test_held_out_data_of_its_own(make_config, tmp_path):
    lines, others = sentences(60).splitlines(), sentences(40, seed=1).splitlines()
    overlapping = put_texts(tmp_path / "others.jsonl", [*others, *lines[:7]])
    settings = {"source": put_texts(tmp_path / "a.jsonl", lines)}
    seen = Recorder()
    loaded = load(make_config(data=settings, eval={"source": overlapping}), seen)
    assert loaded.fingerprint == load(make_config(data=settings)).fingerprint
    assert texts(loaded.held_out) == [*others, *lines[:7]]
    assert loaded.held_out.tokenizer.fingerprint == loaded.tokenizer.fingerprint
    assert [note[:21] for note in seen.notes if "also trained on" in note] == ["7 of the 47 documents"]


@pytest.mark.parametrize(
    ("lines", "settings", "message"),
    [
        (["one document only, which is long enough"] * 30, {},
         "holds out all 30 documents of .*, of which 1 are different"),
        (sentences(30).splitlines(), {"source": "x.jsonl", "fraction": 0.1}, "eval.source names other text"),
        (sentences(30).splitlines(), {"fraction": 1.5}, "eval.fraction: should be less than 1"),
        (sentences(30).splitlines(), {"evry": 1}, "unknown key eval.evry.*every"),
        (["a b"] * 2 + sentences(30).splitlines(), {"fraction": 0.01},
         r"longer than the data that is held out \(eval.fraction"),
    ],
)  # fmt: skip
def test_mistakes(lines, settings, message, make_config, tmp_path):
    data = {"source": put_texts(tmp_path / "a.jsonl", lines), "sequence_length": 64 if "longer" in message else 16}
    tiny_runs.rejected(message, lambda: load(make_config(data=data, eval=settings)))


def expected_loss(model, held_out, rows):
    inputs, targets = held_out.batch(0, 0, rows)
    with torch.no_grad():
        logits = model(input_ids=inputs).logits.float()
    return float(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


@pytest.mark.thorough
@pytest.mark.parametrize("level", [slow("bf16"), "fp8"])
def test_the_loss_is_that_of_a_plain_loop(level, make_config, tmp_path):
    evaluated = {"every": 4, "fraction": 0.3, "batches": 10}
    config = make_config(eval=evaluated, optim={"batch": 5}, precision={"level": level})
    result = run(config, out=tmp_path)
    rows = read_metrics(tmp_path)
    assert [row.step for row in rows if row.held_out] == [4, 6] and result.held_out == rows[-1].held_out
    assert RunResult.read(tmp_path) == result
    model = AutoModelForCausalLM.from_pretrained(latest_checkpoint(tmp_path), dtype=torch.bfloat16)
    held_out = load(config).held_out
    assert 10 * 5 > held_out.windows > 5 and held_out.windows % 5  # the last batch is not full
    key = "loss_high_precision" if level == "fp8" else "loss"
    # The chunked loss adds up in another order, and bf16 products of other sizes in other blocks.
    assert result.held_out[key] == pytest.approx(expected_loss(model, held_out, held_out.windows), rel=1e-4)
    if level == "fp8":
        assert 0 < abs(result.held_out["loss"] / result.held_out[key] - 1) < 0.02


TRACES = [
    slow({"precision": {"level": "fp8+activations+optimizer", "recipe": "rowwise"}, "optim": {"micro_batches": 2}}),
    slow({"precision": {"level": "fp8", "recipe": "rowwise_equalized"}}),
    {"precision": {"level": "fp8", "autopilot": True, "keep_weights": True}, "inspect": {"every": 2}},
    slow({"precision": {"parameters": "fp32", "checkpointing": "full"}}),
    {"model": tiny_runs.GPT2},  # dropout
]


@pytest.mark.thorough
@pytest.mark.parametrize("case", TRACES, ids=str)
def test_evaluation_and_samples_leave_no_trace(case, make_config, tmp_path):
    own = put_texts(tmp_path / "a.jsonl", sentences(40, seed=7).splitlines())
    for name, every in (("often", 1), ("never", None)):
        section = {} if every is None else {"eval": {"every": every, "source": own, "batches": 2}, "sample": SAMPLE}
        run(make_config(**case, **section), out=tmp_path / name)
    assert_no_trace(tmp_path / "often", tmp_path / "never", statistics="inspect" in case)
    assert len([row for row in read_metrics(tmp_path / "often") if row.held_out]) == 6


@pytest.mark.parametrize(("steps", "repeats"), [(20, False), (80, True)])
def test_a_run_says_how_often_it_sees_its_data(steps, repeats, make_config):
    config = make_config(run={"steps": steps}, eval={"fraction": 0.3})
    loaded, seen = load(config), Recorder()
    loop._load_data(config, Ranks(torch.device("cpu")), seen)
    epochs = steps * 4 / loaded.windows
    assert (epochs > 1) == repeats
    (line,) = [stage for stage in seen.stages if stage.startswith("data: ")]
    assert f"{loaded.documents} documents, {loaded.tokens:,} tokens" in line and f"takes {epochs:.3g} epochs" in line
    assert loaded.held_out.documents == 1 and f"held out: 1 document, {loaded.held_out.tokens:,} tokens" in line
    assert any(note.startswith(f"the data repeats: {steps} steps take {epochs:.3g}") for note in seen.notes) == repeats


# --- patience ---


RISING = {"optim": {"lr": 3.0, "schedule": "constant"}, "run": {"steps": 12}}


@pytest.fixture
def held_out(text_files):
    return lambda **settings: {"eval": {"source": str(text_files / "*.txt"), "every": 1, "batches": 1, **settings}}


def test_what_counts():
    patience = Patience(2)
    for loss, since in ((3.0, 0), (3.0, 1), (2.0, 0), (None, 1)):
        patience.note(loss)
        assert patience.since == since and not patience.over
    patience.note(2.5)
    assert patience.over and patience.best == 2.0
    other = Patience(3, [3.0, 3.0, 2.0, None, 2.5])
    assert not other.over
    other.note(2.0)
    assert other.over and not Patience(0).over
    other = Patience(3, [None, None, None])
    assert other.over and "has not been finite in 3 measurements" in str(other)


def test_a_run_ends_early_and_goes_on(make_config, held_out, tmp_path):
    seen = recorded(make_config(**RISING, **held_out(patience=2)), tmp_path / "a")
    result, losses = seen.result, [row.held_out["loss"] for row in seen.rows]
    assert result.stopped == "early" and result.steps == losses.index(min(losses)) + 3 < 12
    assert any("measurements (eval.patience): the run ends early" in note for note in seen.notes)
    again = run(make_config(**RISING, **held_out(patience=2)), out=tmp_path / "a", resume=True)
    assert (again.stopped, again.steps) == ("early", result.steps)
    more = run(make_config(**RISING, **held_out(patience=20)), out=tmp_path / "a", resume=True)
    assert (more.stopped, more.steps) == ("done", 12)
    run(make_config(**RISING, **held_out()), out=tmp_path / "b")
    assert [row.loss for row in read_metrics(tmp_path / "a")] == [row.loss for row in read_metrics(tmp_path / "b")]


def test_a_measurement_that_a_signal_interrupted_counts(make_config, held_out, tmp_path, monkeypatch):
    config = make_config(**RISING, **held_out(patience=2))
    whole = run(config, out=tmp_path / "whole")
    stop, original = whole.steps, Trainer.evaluate

    def evaluate(trainer):
        if trainer.step == stop and not (tmp_path / "asked").exists():
            (tmp_path / "asked").touch()
            terminate()
        return original(trainer)

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    assert run(config, out=tmp_path / "cut").stopped == "sigterm"
    for _ in range(2):
        result = run(config, out=tmp_path / "cut", resume=True)
        assert (result.stopped, result.steps) == ("early", stop)


def test_a_comparison_takes_no_patience(make_config, held_out, tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(make_config(**held_out(patience=2)).to_toml())
    with pytest.raises(ConfigError, match="eval.patience = 2 would end arms after unequal steps"):
        make_arms(path, [], ["a:", "b:precision.level=fp8"], "0")


# --- samples: what greedy decoding gives ---


SAMPLE = {"every": 4, "prompts": ["the leaf", "", "a printer cuts"], "tokens": 6}


def samples(out):
    return {row.step: row.samples for row in read_metrics(out) if row.samples is not None}


@pytest.mark.thorough
@pytest.mark.parametrize("case", [{}, {"packing": "documents"}], ids=str)
def test_greedy_samples_are_those_of_generate(case, make_config, tmp_path):
    config = make_config(sample=SAMPLE, precision={"parameters": "fp32"}, data=case, run={"steps": 30})
    seen = recorded(config, tmp_path)
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
    message = r"sample.tokens = 15 after a prompt of \d+ tokens exceeds .* = 16, beyond"
    tiny_runs.refused_run(message, config, tmp_path / "run")


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
