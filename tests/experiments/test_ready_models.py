"""Ready configurations: their text, and the search for a layout that fits, on a planner that is made up."""

import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForImageTextToText

from octavo.experiments import fit_layout as fitting
from octavo.experiments.fit_layout import Search, fit_layout
from octavo.experiments.ready_models import PlannedStep, StepLayout, ready_model, ready_models, render, step_table
from octavo.train.config.run_config import ConfigError, load_config, parse_config
from octavo.train.config.sections import OF_IMAGES
from support.command import octavo, refused

PUBLISHED = {
    "llama2-7b": 6.74, "llama2-13b": 13.02, "llama3-8b": 8.03, "llama3-70b": 70.55, "qwen3-8b": 8.19,
    "command-r-35b": 34.98, "mixtral-8x7b": 46.70, "qwen3-30b-a3b": 30.53, "deepseek-v3-16b": 16.00,
    "nvila-like-8b": 8.05, "vit-l16": 0.304, "dit-xl": 0.750,
}  # fmt: skip
"""Parameters in billions as published; of deepseek-v3-16b Moonlight's 15.96, with compressed queries; of nvila-like-8b
Qwen2-7B's 7.616, the 0.413 of a SigLIP-so400m tower without pooling, and 0.017 of the projector; of dit-xl as diffusers
has it, with embeddings of time and class in each block (0.675 in the paper, which has them once)."""
LAYOUT = StepLayout(gpus=8, sequences=2, micro_batches=4, checkpointing="none")
SMALL = replace(
    ready_model("llama3-8b"), name="small", title="Small", gpus=1, sequence=64, batch=16,
    config={"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64},
)  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", ready_models())
def test_models_have_their_published_size(name):
    model = ready_model(name)
    with torch.device("meta"):
        if name == "dit-xl":
            made = pytest.importorskip("diffusers").DiTTransformer2DModel(**model.config)
        else:
            auto = {"nvila-like-8b": AutoModelForImageTextToText, "vit-l16": AutoModelForImageClassification}
            config = AutoConfig.for_model(model.type, **model.config)
            made = auto.get(name, AutoModelForCausalLM).from_config(config)
    assert sum(p.numel() for p in made.parameters()) / 1e9 == pytest.approx(PUBLISHED[name], abs=0.006)


@pytest.mark.parametrize("name", ready_models())
def test_every_model_renders_a_configuration(name):
    model = ready_model(name)
    layout = replace(LAYOUT, dp_replicate=2, checkpointing="full", reasons={"micro_batches": "as many as fit"})
    steps = [PlannedStep(precision="FP8", gpus=8, layout=layout, seconds=1.5, tokens_per_second=1e6, peak=2**35),
             PlannedStep(precision="bf16", gpus=8)]  # fmt: skip
    text = render(model, layout, steps, f"configs/{name}.toml", ("h100", "H100 SXM"))
    assert max(map(len, text.splitlines())) <= 120
    config = parse_config(tomllib.loads(text))
    length = 1 if model.task in OF_IMAGES else model.sequence
    assert (config.optim.batch, config.optim.micro_batches) == (64, 4)
    assert (config.precision.checkpointing, config.parallel.dp_replicate) == ("full", 2)
    assert config.model.config == model.config and config.data.sequence_length == length
    assert config.resolved.states == "fp8" and config.run.name == name
    assert "# as many as fit" in text and "never run on a GPU" in text
    assert ("Experts count as bf16" in text) == (name in ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3-16b"))


def test_the_table_says_what_to_add():
    full = replace(LAYOUT, gpus=64, micro_batches=1, checkpointing="full")
    steps = [
        PlannedStep(precision="FP8", gpus=8, layout=LAYOUT, seconds=12.345, tokens_per_second=98765.4, peak=3 * 2**30),
        PlannedStep(precision="bf16", gpus=8),
        PlannedStep(precision="FP8", gpus=64, layout=full, seconds=1.0, tokens_per_second=1e6, peak=2**30, largest=7),
    ]
    lines = step_table(steps, LAYOUT)[1:]
    assert [line.split() for line in lines] == [
        ["8", "FP8", "12.35", "98,765", "3.0", "0"],
        ["bf16", "does", "not", "fit"],
        ["64", "FP8", "1.00", "1,000,000", "1.0", "7", "optim.batch=128", "optim.micro_batches=1",
         "precision.checkpointing=full"],
    ]  # fmt: skip


@dataclass
class Planner:
    """Stands for `plan_configured`: GiB per sequence by checkpointing, seconds per sequence, and what a step waits."""

    gib: dict[str, float] = field(default_factory=lambda: {"none": 20.0, "selective": 10.0, "full": 5.0})
    states: float = 100.0
    seconds: dict[str, float] = field(default_factory=lambda: {"none": 1.0, "selective": 1.1, "full": 1.3})
    waits: float = 0.0
    copies_wait: float = 0.0
    asked: list[tuple[str, int, int]] = field(default_factory=list)

    def __call__(self, config, *, gpu, gpus):
        kind, copies = config.precision.checkpointing, config.parallel.dp_replicate
        sequences = config.optim.batch // (gpus * config.optim.micro_batches)
        self.asked.append((kind, sequences, copies))
        states = self.states * copies / gpus * (3 if config.precision.level == "bf16" else 1)

        def largest_batch(limit):
            return max(0, int((limit / 2**30 - states) // self.gib[kind]))

        wait = self.waits if copies == 1 else self.copies_wait
        seconds = config.optim.batch / gpus * self.seconds[kind] + wait
        plan = SimpleNamespace(converted=[] if config.precision.level == "bf16" else ["a"])
        peak = int((states + self.gib[kind] * sequences) * 2**30)
        time = {"seconds": seconds, "tokens_per_second": config.optim.batch / seconds, "communication": wait}
        time, memory = SimpleNamespace(**time, waiting=0.0), SimpleNamespace(peak=peak, largest_batch=largest_batch)
        return SimpleNamespace(plan=plan, memory=memory, time=time)


@pytest.fixture
def planner(monkeypatch):
    made = Planner()
    monkeypatch.setattr(fitting, "plan_configured", made)
    monkeypatch.setattr(fitting, "find_gpu", lambda name: SimpleNamespace(usable=80 * 2**30, name="G", fp8_tflops=1.0))
    monkeypatch.setattr(fitting, "GPUS_PER_MACHINE", 4)
    return made


def fit(gpus):
    return fit_layout(Search(model=SMALL, gpu="h100", gpus=gpus))


def test_nothing_is_recomputed_where_that_fits(planner):
    best = fit(4)  # 72 GiB are usable, 25 are states: 2 sequences of 20
    assert (best.layout.checkpointing, best.layout.sequences, best.layout.micro_batches) == ("none", 2, 2)
    assert {kind for kind, *_ in planner.asked} == {"none"}
    assert best.layout.reasons["checkpointing"] == "fits, and recomputes nothing"
    assert best.step == PlannedStep(
        precision="FP8", gpus=4, layout=best.layout, seconds=4.0, tokens_per_second=4.0, peak=65 * 2**30, largest=2
    )


def test_the_fastest_that_fits_is_taken(planner):
    planner.states = 240.0  # 60 on each of 4: 12 GiB are left
    best = fit(4)
    assert (best.layout.checkpointing, best.layout.sequences) == ("selective", 1)
    assert best.layout.reasons["checkpointing"] == '"none" would not fit; a step with "full" takes 1.18× as long'
    planner.seconds["selective"] = 2.0
    assert (fit(4).layout.checkpointing, fit(4).layout.sequences) == ("full", 2)


def test_machines_hold_copies_where_communication_waits(planner):
    planner.waits = 1.0
    assert fit(8).layout.dp_replicate == 2 and ("none", 1, 2) in planner.asked
    planner.copies_wait = 2.0
    assert fit(8).layout.dp_replicate == 1
    planner.waits = 0.0
    planner.asked.clear()
    fit(8)
    assert all(copies == 1 for *_, copies in planner.asked)


def test_what_does_not_fit_says_how_many_gpus_would_do(planner):
    message = r"Small does not fit on 1 × G: .* needs 105.00 GiB .*; it fits on 2: set --gpus"
    with pytest.raises(ConfigError, match=message):
        fit(1)
    planner.gib["full"] = 90.0
    with pytest.raises(ConfigError, match=r"nor on up to 4096: it needs GPUs with more memory"):
        fit(1)


def test_bf16_has_a_layout_of_its_own(planner):
    steps = fitting.planned_steps(fit(4), Search(model=SMALL, gpu="h100", gpus=4))
    assert [step.precision for step in steps] == ["FP8", "bf16"] and steps[1].layout is None  # 75 GiB of states
    steps = fitting.planned_steps(fit(8), Search(model=SMALL, gpu="h100", gpus=8))
    assert steps[1].layout is not None and steps[1].layout.sequences == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "llama3-8b", "--gpu", "a100"], "A100 SXM 80 GB has no FP8 products"),
        (["--model", "llama3-8b", "--gpu", "h10"], "did you mean 'h100'"),
        (["--model", "LLama3-8B-instruct"], "did you mean 'llama3-8b'"),
        (["--model", "zzz"], "there are llama2-7b, llama2-13b"), ([], "octavo init --list"),
        (["--model", "llama3-8b", "--gpus", "0"], "Invalid value for '--gpus'"),
    ],
)  # fmt: skip
def test_what_init_does_not_know(words, message):
    refused(octavo("init", *words), message)


def test_init_writes_once(planner, tmp_path, monkeypatch):
    def init(*words):
        return octavo("init", "--model", "llama3-8b", "--gpus", 8, *words)

    monkeypatch.chdir(tmp_path)
    assert [line.split()[0] for line in octavo("init", "--list").stdout.splitlines()] == list(ready_models())
    assert "octavo train llama3-8b.toml --shrink" in init().stdout
    path = tmp_path / "llama3-8b.toml"
    assert load_config(path).optim.batch == 512 and "--gpu h100 --gpus 8" in path.read_text()
    path.write_text("mine")
    refused(init(), "add --force")
    assert path.read_text() == "mine"
    assert init("--force").exit_code == 0 and path.read_text() != "mine"
    assert init("--out", "new folder/own.toml").exit_code == 0
    assert "octavo plan 'new folder/own.toml'" in Path("new folder/own.toml").read_text()
    refused(init("--out", "new folder"), "is a folder")
