"""`octavo export --to`: the FP8 values of a run, from its checkpoints."""

import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file
from test_checkpoint import SMALL, make_trainer
from typer.testing import CliRunner

from octavo.cli import app
from octavo.kernels import quantize
from octavo.numerics import RECIPES
from octavo.train import ConfigError
from octavo.train.checkpoint.digests import check_digests, write_digests
from octavo.train.checkpoint.export import export
from octavo.train.checkpoint.retention import latest_checkpoint

MODEL = {"type": "llama", "config": SMALL}


@pytest.fixture
def trained(make_config, tmp_path):
    trainer = make_trainer(make_config(model=MODEL, precision={"level": "fp8"}))
    trainer.train_step()
    trainer.save(tmp_path / "run")
    return trainer, latest_checkpoint(tmp_path / "run")


def check_rows(model, folder, without=()):
    tensors = load_file(folder / "model.safetensors")
    rows = [name for name in model.state_dict() if "proj" in name and not any(part in name for part in without)]
    for name in rows:
        expected = quantize(model.state_dict()[name].detach(), RECIPES["rowwise"].w)
        assert torch.equal(tensors[name].view(torch.uint8), expected.data.view(torch.uint8)), name
        assert torch.equal(tensors[f"{name}_scale"], expected.scale)
    assert sum(name.endswith("_scale") for name in tensors) == len(rows)
    return tensors


def test_an_export_holds_the_values_of_training(trained, tmp_path):
    trainer, folder = trained
    recipes = json.loads((folder / "trainer.json").read_text())["recipes"]
    assert set(recipes.values()) == {"rowwise"} and len(recipes) == 7
    exported = export(folder, tmp_path / "out", "fp8-row")
    check_rows(trainer.model, exported.path)
    assert str(exported) == f"written: {tmp_path / 'out'} (fp8-row: 7 modules in FP8, 1 in high precision)"
    check_digests(tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"README.md", "config.json", "digests.json", "generation_config.json", "tokenizer.json"} <= names
    assert not {"trainer.json", "optimizer.pt"} & names
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| base model | none: a new llama |" in card and ", step 1 |" in card and "verdict" not in card
    assert str(tmp_path) not in card


def test_layers_that_moved_in_training_are_exported_as_they_ended(trained, tmp_path):
    from octavo.nn import change_recipe

    trainer, _ = trained
    change_recipe(trainer.model, "model.layers.0.mlp.up_proj", "blockwise", reason="outliers")
    change_recipe(trainer.model, "model.layers.0.mlp.down_proj", None, reason="outliers")
    trainer.step = 2
    trainer.save(tmp_path / "run")
    exported = export(latest_checkpoint(tmp_path / "run"), tmp_path / "out", "fp8-row")
    assert exported.high_precision["model.layers.0.mlp.down_proj"] == "in high precision in training"
    assert "recipe blockwise" in exported.high_precision["model.layers.0.mlp.up_proj"]
    check_rows(trainer.model, exported.path, without=("up_proj", "down_proj"))
    assert any("up_proj: FP8 in training, high precision here" in note for note in exported.notes)
    assert any("vLLM joins" in note for note in exported.notes)


def test_mistakes_are_named_and_write_nothing(make_config, trained, tmp_path):
    _, folder = trained

    def fails(checkpoint, match, to="fp8-row"):
        with pytest.raises(ValueError, match=match):
            export(checkpoint, tmp_path / "out", to)
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))

    fails(folder, "computes in recipe rowwise, which fp8-block does not describe", "fp8-block")
    fails(folder, "unknown layout 'fp8-col'", "fp8-col")
    fails(tmp_path, "is no checkpoint of a run")
    with pytest.raises(ConfigError, match="inside the checkpoint, which it would damage"):
        export(folder, folder / "new" / "out", "fp8-row")
    assert not (folder / "new").exists()
    with pytest.raises(ValueError, match="is not empty: choose another folder"):
        export(folder, folder.parent, "fp8-row")
    older = shutil.copytree(folder, tmp_path / "older")
    state = json.loads((older / "trainer.json").read_text())
    del state["recipes"]
    (older / "trainer.json").write_text(json.dumps(state))
    write_digests(older, {})
    fails(older, "has no layer that computed in FP8")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    fails(folder, "is damaged: model.safetensors is not what was written")
    plain = make_trainer(make_config(model=MODEL))
    plain.save(tmp_path / "plain")
    fails(latest_checkpoint(tmp_path / "plain"), r"was trained in bf16.*precision\.recipe=rowwise")


def test_sigterm_leaves_nothing(trained, tmp_path, monkeypatch):
    def terminated(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("octavo.train.checkpoint.export.write", terminated)
    result = CliRunner().invoke(app, ["export", str(trained[1]), str(tmp_path / "out")])
    assert result.exit_code == 128 + signal.SIGTERM and signal.getsignal(signal.SIGTERM) is handler
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))
