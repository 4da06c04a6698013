"""Runs with `[lora]`: small checkpoints, bitwise resume, PEFT's files, plans, ranks."""

import errno
import json
import os
import shutil

import pytest
import torch
from tiny_runs import LLAMA, assert_resumes, image_tables, job, killed, recorded, refused_run, rejected, slow
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, LlamaConfig, LlamaForCausalLM

from octavo.nn import ResidentWeight
from octavo.train import ConfigError, lora, parse_config, read_metrics, run
from octavo.train.checkpoint.export import export
from octavo.train.data.tokenizer import load_tokenizer
from octavo.train.lora import freeze, freeze_unused, frozen_note
from octavo.train.run_plan import plan_step
from octavo.train.trainer import Trainer

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
WIDE = LLAMA | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
FP8 = {"level": "fp8"}


@pytest.fixture(scope="module")
def base(tmp_path_factory, make_config):
    out = tmp_path_factory.mktemp("base")
    run(make_config(model={"type": "llama", "config": WIDE}, run={"steps": 1}, optim={"warmup": 0}), out=out)
    return out / "checkpoints" / "step-000001"


@pytest.fixture
def lora_config(base, make_config):
    def make(**sections):
        model = {"path": str(base)}
        return make_config(**({"lora": {"rank": 4}, "model": model, "precision": FP8} | sections))

    return make


def test_a_rank_beyond_memory(make_config, monkeypatch):
    def allocate(*_):
        raise RuntimeError("can't allocate memory:\nyou tried to allocate 274877906816 bytes")

    monkeypatch.setattr(peft, "inject_adapter_in_model", allocate)
    settings = make_config(lora={"rank": 2**31 - 1}).lora
    with pytest.raises(ConfigError, match=r"lora\.rank = 2147483647: .* can't allocate memory: you tried"):
        lora.add_adapters(torch.nn.Sequential(torch.nn.Linear(2, 2)), settings, 0, None)


@pytest.mark.slow
def test_weight_only_layers_resume_and_follow_the_base_in_bf16(lora_config, tmp_path):
    config = lora_config(run={"save_every": 2}, lora={"rank": 4, "weight_only": ["*"]})
    run(config, out=tmp_path / "whole")
    assert_resumes(config, tmp_path)
    layers = (tmp_path / "whole" / "layers.json").read_text()
    assert layers.count('"rowwise_weight_only"') == 14 and '"rowwise"' not in layers
    run(lora_config(lora={"rank": 4, "base": "bf16"}), out=tmp_path / "bf16")
    for one, other in zip(read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "bf16"), strict=True):
        assert one.loss == pytest.approx(other.loss, rel=0.01)
    forecast = plan_step(config, gpu="h100")
    decisions = forecast.configured.plan.decisions.values()
    assert {d.recipe.name for d in decisions if d.recipe} == {"rowwise_weight_only"}
    with pytest.raises(ValueError, match="weight_only: '\\*v_prjo' matches no layer"):
        run(lora_config(lora={"rank": 4, "weight_only": ["*v_prjo"]}), out=tmp_path / "typo")


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # PEFT's, of its own patterns
@pytest.mark.filterwarnings("ignore:.*reads a weight that is resident in FP8")  # PEFT's sum
def test_experts_of_a_mixture_are_resident(make_config, tmp_path):
    mixtral = WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = make_config(model={"type": "mixtral", "config": mixtral}, lora={"rank": 4}, precision=FP8)
    run(config, out=tmp_path / "run")
    rows = json.loads((tmp_path / "run" / "layers.json").read_text())
    experts = [row for row in rows if row["experts"]]
    assert len(experts) == 2 and all(1 <= row["resident_bytes"] / row["weights"] <= 1.05 for row in experts)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["fp8", slow("bf16")])
def test_checkpoints_hold_adapters_and_resume_bit_for_bit(lora_config, base, tmp_path, monkeypatch, kind):
    config = lora_config(run={"save_every": 2}, lora={"rank": 4, "base": kind, "dropout": 0.1})
    (note,) = [note for note in recorded(config, tmp_path / "whole").notes if "are not trained" in note]
    assert note.endswith("parameters are not trained: [lora] trains the adapters alone")
    rows = read_metrics(tmp_path / "whole")
    assert rows[-1].loss < rows[0].loss
    assert_resumes(config, tmp_path)
    checkpoint = tmp_path / "whole" / "checkpoints" / f"step-{rows[-1].step:06d}"
    size = sum(file.stat().st_size for file in checkpoint.rglob("*.safetensors"))
    assert size < 0.2 * (base / "model.safetensors").stat().st_size
    exported = export(checkpoint, tmp_path / "exported").path
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), exported)
    merged = model.merge_and_unload()
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(merged.state_dict()[name], plain.state_dict()[name])
    rejected("holds adapters, which fp8-row does not have", export, checkpoint, tmp_path / "fp8", to="fp8-row")

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("octavo.train.checkpoint.export.write_digests", full)
    with pytest.raises(OSError, match=r"out cannot be written: .*No space left on device"):
        export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_peft_reads_the_adapters_of_an_image_classifier(tmp_path):
    pytest.importorskip("sklearn")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vit = {"type": "vit", "config": sizes | {"patch_size": 4}}
    config = image_tables(vit, {"task": "image-classification"}, run={"steps": 1}, optim={"warmup": 0})
    run(parse_config(config), out=tmp_path / "base")
    base = tmp_path / "base" / "checkpoints" / "step-000001"
    run(parse_config(config | {"model": {"path": str(base)}, "lora": {"rank": 2}}), out=tmp_path / "run")
    exported = export(tmp_path / "run" / "checkpoints" / "step-000001", tmp_path / "exported").path
    plain = AutoModelForImageClassification.from_pretrained(base)
    before = plain.state_dict()["classifier.weight"].clone()
    merged = peft.PeftModel.from_pretrained(plain, exported).merge_and_unload()
    assert not torch.equal(merged.state_dict()["classifier.weight"], before)


@pytest.mark.thorough
def test_another_base_does_not_resume(lora_config, base, tmp_path):
    base = shutil.copytree(base, tmp_path / "base")
    config = lora_config(run={"save_every": 2}, model={"path": str(base)})
    killed(config, tmp_path / "run", 3)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.model.layers[0].mlp.up_proj.weight.data.mul_(2)
    model.save_pretrained(base)
    (base / "digests.json").unlink()
    refused_run("adapters of other base weights", config, tmp_path / "run", resume=True)


@pytest.mark.thorough
def test_the_base_is_resident_and_adapters_alone_are_trained(lora_config, base):
    data = type("Data", (), {"tokenizer": load_tokenizer(base), "fingerprint": ""})()
    trainer = Trainer(lora_config(), data, torch.device("cpu"))
    resident = [name for name, p in trainer.model.named_parameters() if isinstance(p, ResidentWeight)]
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert len(resident) == 14 and len(trained) == 28 and all("lora_" in name for name in trained)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("base_format", ["fp8", "bf16"])
@pytest.mark.parametrize(
    "parallel", [{"dp_replicate": 2}, {}, {"fp8_comm": "gather"}], ids=["copies", "shards", "gather"]
)
def test_ranks_share_the_batch_and_the_base(gloo, lora_config, tmp_path, parallel, base_format):
    precision, optim = FP8 | {"parameters": "fp32"}, {"batch": 8, "micro_batches": 2}
    config = lora_config(precision=precision, optim=optim, lora={"rank": 4, "base": base_format})
    settings = config.model_dump(exclude_none=True)
    one = job(settings, tmp_path / "one")
    two = gloo.run(job, 2, settings | {"parallel": parallel}, str(tmp_path / "two"), timeout=300.0)
    assert two[0].losses.final == pytest.approx(one.losses.final, rel=2e-2)
    rows = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two")]
    assert [row.loss for row in rows[1]] == pytest.approx([row.loss for row in rows[0]], rel=1e-3)
    checkpoint = tmp_path / "two" / "checkpoints" / f"step-{one.steps:06d}"
    export(checkpoint, tmp_path / "exported")
    assert (tmp_path / "exported" / "adapter_model.safetensors").stat().st_size < 2e5


@pytest.mark.parametrize("kind", [slow("bf16"), "fp8"])
def test_adapters_are_merged_into_their_base(lora_config, base, tmp_path, kind):
    config = lora_config(run={"steps": 2}, optim={"warmup": 0}, lora={"rank": 4, "base": kind})
    run(config, out=tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    merged = AutoModelForCausalLM.from_pretrained(export(checkpoint, tmp_path / "merged", merge=True).path)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    adapters = export(checkpoint, tmp_path / "adapters").path
    expected = peft.PeftModel.from_pretrained(plain, adapters).merge_and_unload().state_dict()
    assert merged.state_dict().keys() == expected.keys()
    assert {value.dtype for value in merged.state_dict().values()} == {torch.bfloat16}
    assert [name for name, value in merged.state_dict().items() if not torch.equal(value, expected[name])] == []
    rejected("--merge adds the adapters of a run", export, checkpoint, tmp_path / "fp8", to="fp8-row", merge=True)


def llama(**changes):
    return LlamaForCausalLM(LlamaConfig(vocab_size=300, **LLAMA | changes))


TIED = "lm_head", "model.embed_tokens"


@pytest.mark.parametrize(("pattern", "names"), [("lm_head", TIED), ("embed_tokens", TIED[::-1]), ("model", TIED[::-1])])
def test_half_of_a_tied_pair(pattern, names):
    with pytest.raises(ConfigError, match=r'freezes {}.weight, which is also .* freeze both \("{}"\)'.format(*names)):
        freeze(llama(tie_word_embeddings=True), [pattern])
    untied = llama(tie_word_embeddings=False)
    freeze(untied, [pattern])
    assert any(parameter.requires_grad for parameter in untied.parameters())


def test_the_note_counts_tied_parameters_once_and_names_those_without_gradients():
    model = llama(tie_word_embeddings=True)
    assert frozen_note(model, []) == ""
    freeze(model, ["lm_head", "embed_tokens"])
    total = sum(parameter.numel() for parameter in model.parameters())
    note = f"9,600 of {total:,} parameters are not trained: 9,600 by model.frozen"
    assert frozen_note(model, ["lm_head", "embed_tokens"]) == note
    model = llama()
    freeze_unused(model, lambda copy: copy.model.layers[0].mlp(torch.ones(1, 1, 32)).sum())
    assert "that no gradient reaches (model.embed_tokens, model.layers.0.self_attn.q_proj, " in frozen_note(model, [])
    model.model.norm.weight.requires_grad_(False)
    assert ";" not in frozen_note(model, []) and "32 by model.frozen; " in frozen_note(model, ["norm"])


def test_a_run_prints_what_it_does_not_train(make_config, tmp_path):
    model = {"type": "llama", "config": LLAMA, "frozen": ["*norm*"]}
    seen = recorded(make_config(model=model, run={"steps": 1}, optim={"warmup": 0}), tmp_path)
    assert any(note.startswith("224 of ") and note.endswith("224 by model.frozen") for note in seen.notes)
