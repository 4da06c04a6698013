"""The commands of `octavo` that README, documents and `--help` quote, run as written, in a folder of their own.

Training is made small by settings behind the command (a model of 32 features, a few steps) and eight ranks by two; all
else is what the document says. `NOT_RUN` names what cannot run here, and why.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from test_commands import QUOTED, ROOT, words_of

pytestmark = pytest.mark.slow

SMALL = (
    "model.config.hidden_size=32", "model.config.intermediate_size=64", "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=2", "model.config.num_key_value_heads=1", "data.vocab_size=512",
    "data.sequence_length=64", "optim.batch=4", "run.steps=6",
)  # fmt: skip
TRAINING = ("train", "demo", "compare")
PLACES = {"CHECKPOINT": "runs/demo/checkpoints/step-000200", "OUT": "exported"}
"""What this command leaves open, beside `test_commands.PLACES`."""
NOT_RUN = {
    r"train configs/(llama|qwen|command|mixtral|deepseek)[\w.-]+$": "needs GPUs; runs with `--shrink`",
    r"--nnodes": "needs four machines",
    r"--max-restarts N": "an option in a sentence, not a command",
    r"--nproc-per-node 8$": "an option in a sentence, not a command",
    r"octavo (calibrate|compare|export|init|inspect|train|plan --memory)$": "names the command in a sentence",
    r"octavo calibrate": "needs a GPU; without one it ends with an error, which tests/test_cli.py holds",
}
COMMANDS = [c for c in dict.fromkeys(c for _, c in QUOTED) if re.match("octavo |torchrun ", c)]
ALLOWED_CODES = {"compare": (0, 1, 3, 4)}
"""Verdicts, which are exit codes: of a few steps of a small model any may come."""
TEXT = "A leaf folds eight times before a printer cuts it into pages and binds them in order {}.\n"


def reason_not_run(command: str) -> str | None:
    command = command.partition("#")[0].partition(" | ")[0].removesuffix(" …").strip()
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, command)), None)


def octavo(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    command = [sys.executable, "-m", "octavo", *words]
    if words[0] == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, start_new_session=True
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make what a reader of the documents has: configurations, texts, losses, a GPU's table, and runs of 200 steps."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "configs", folder / "configs")
    for name in ("corpus", "notes"):
        (folder / name).mkdir()
        for number in range(3):
            text = "".join(TEXT.format(100 * number + line) for line in range(1500))
            (folder / name / f"{number}.txt").write_text(text)
    losses = {"baseline": [3.00, 3.02, 2.99], "arms": {"fp8": [3.01, 3.02, 3.0]}}
    (folder / "losses.json").write_text(json.dumps(losses))
    done = octavo(folder, "train", "configs/demo.toml", *SMALL, "precision.level=fp8", "inspect.every=50",
                  "run.steps=200", "run.save_every=100", "--out", "runs/looked")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "runs").rename(folder / "made")
    return folder


def runnable(command: str) -> list[str]:
    words = [PLACES.get(word, word) for word in words_of(command)]
    if "--gpus" in words:
        words = [word.replace("configs/demo.toml", "configs/llama3-70b.toml") for word in words]
    words = ["2" if before == "--nproc-per-node" else word for before, word in zip(["", *words], words, strict=False)]
    words = ["20" if before == "--seconds" else word for before, word in zip(["", *words], words, strict=False)]
    start = words.index("octavo") + 1
    if "--shrink" in words:
        words += ["run.steps=6"]
    elif start < len(words) and words[start] in TRAINING and "--losses" not in words:
        words += SMALL
    return words[1:] if words[0] == "octavo" else words


@pytest.mark.parametrize("command", [c for c in COMMANDS if reason_not_run(c) is None])
def test_it_runs_as_written(command: str, folder: Path) -> None:
    words = runnable(command)
    for name in ("runs", "exported"):
        shutil.rmtree(folder / name, ignore_errors=True)
    if not set(words) & set(TRAINING):
        for name in ("looked", "demo"):
            shutil.copytree(folder / "made" / "looked", folder / "runs" / name)
    if "--resume" in words:
        assert octavo(folder, *(word for word in words if word != "--resume")).returncode == 0
    done = octavo(folder, *words)
    assert done.returncode in ALLOWED_CODES.get(words[0], (0,)), done.stdout[-2000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    if "--json" in words:
        json.loads(done.stdout)


def test_what_is_not_run_is_still_quoted() -> None:
    for pattern in NOT_RUN:
        assert any(re.search(pattern, command.partition("#")[0].strip()) for command in COMMANDS), pattern
