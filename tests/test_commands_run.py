"""The commands of `octavo` that README, documents and `--help` quote, run as written, in a folder of their own.

Training is made small by settings behind the command (a model of 32 features, a few steps) and eight ranks by two; all
else is what the document says. `NOT_RUN` names what cannot run here, and why.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from urllib.request import urlopen

import pytest

from octavo.train.data.tokenizer import train_tokenizer
from test_commands import QUOTED, ROOT, words_of

pytestmark = pytest.mark.slow

SMALL = (
    "model.config.hidden_size=32", "model.config.intermediate_size=64", "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=2", "model.config.num_key_value_heads=1", "data.vocab_size=512",
    "data.sequence_length=64", "optim.batch=4", "run.steps=6",
)  # fmt: skip
FEW_STEPS = ("run.steps=6",)
"""For models of images, which are small already."""
TRAINING = ("train", "demo", "compare")
PLACES = {"CHECKPOINT": "runs/demo/checkpoints/step-000200", "OUT": "exported"}
"""What this command leaves open, beside `test_commands.PLACES`."""
NOT_RUN = {
    r"train configs/(llama|qwen|command|mixtral|deepseek|lora|nvila|dit-xl|vit-l)[\w.-]+$": "needs GPUs",
    r"(plan|train) configs/(?!llama3-8b)[\w.-]+ (--gpu h100 --gpus \d+|--shrink)$": "held by train/test_shrink.py",
    r"torchrun .* parallel\.(tp|pp|cp|ep)=": "held by train/test_hybrid.py",
    r"h100\.json|my-gpu\.toml": "reads what a reader has measured or described; held by tests/planner",
    r"--nnodes": "needs four machines",
    r"--max-restarts( N)?$": "an option in a sentence, not a command",
    r"--nproc-per-node 8$": "an option in a sentence, not a command",
    r"octavo (calibrate|compare|export|init|inspect|train|watch|plan --memory|compare --shrink)$": "names the command",
    r"octavo plan$": "names the command",
    r"octavo calibrate": "needs a GPU; without one it ends with an error, which tests/test_cli.py holds",
}
TUTORIALS = {path.name for path in (ROOT / "docs" / "tutorials").glob("*.md")}
"""Their commands build on each other: `python -m benchmarks tutorials` runs them."""
COMMANDS = [
    command
    for command in dict.fromkeys(c.partition("#")[0].strip() for page, c in QUOTED if page not in TUTORIALS)
    if re.match("octavo |torchrun ", command)
]
ALLOWED_CODES = {"compare": (0, 1, 3, 4), "watch": (0, 130)}
"""Verdicts are exit codes, and of a few steps of a small model any may come; a page is watched until an interrupt."""
TEXT = "A leaf folds eight times before a printer cuts it into pages and binds them in order {}.\n"


def reason_not_run(command):
    command = command.partition(" | ")[0].removesuffix(" …").strip()
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, command)), None)


def octavo(folder, *words):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    command = [sys.executable, "-m", "octavo", *words]
    if words[0] == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, start_new_session=True
    )


def watched(folder, *words):
    """`octavo watch`, interrupted once it serves its page."""
    command = [sys.executable, "-m", "octavo", *words]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        while lines[-1] and "http://" not in lines[-1]:
            lines.append(process.stdout.readline())
        if address := re.search(r"http://[\w.:/]+", lines[-1]):
            urlopen(address[0], timeout=60).close()
        process.send_signal(signal.SIGINT)
        try:
            rest = process.communicate(timeout=60)[0]
        finally:
            process.kill()  # where SIGINT is ignored, as in the background of a script
    return subprocess.CompletedProcess(command, process.returncode, "".join(lines) + rest, "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make what a reader of the documents has: configurations, texts, losses, a GPU's table, and runs of 200 steps."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "configs", folder / "configs")
    for name in ("corpus", "notes"):
        (folder / name).mkdir()
        for number in range(3):
            text = "".join(TEXT.format(100 * number + line) for line in range(1500))
            (folder / name / f"{number}.txt").write_text(text)
    for name, field in (("train", "text"), ("validation", "text"), ("web", "text"), ("chats", "conversation")):
        (folder / name).mkdir()
        for number in range(2):
            texts = [TEXT.format(f"{name} {number} {line}") for line in range(400)]
            talks = [[{"role": "user", "content": text}, {"role": "assistant", "content": text[:20]}] for text in texts]
            rows = texts if field == "text" else talks
            (folder / name / f"{number}.jsonl").write_text("".join(json.dumps({field: row}) + "\n" for row in rows))
    train_tokenizer([TEXT], 300).save(folder / "tokenizer")
    losses = {"baseline": [3.00, 3.02, 2.99], "arms": {"fp8": [3.01, 3.02, 3.0]}}
    (folder / "losses.json").write_text(json.dumps(losses))
    done = octavo(folder, "train", "configs/demo.toml", *SMALL, "precision.level=fp8", "inspect.every=50",
                  "optim.ema=0.9", "run.steps=200", "run.save_every=100", "--out", "runs/looked")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "runs").rename(folder / "made")
    return folder


def runnable(command):
    words = [PLACES.get(word, word) for word in words_of(command)]
    if "--gpus" in words:
        words = [word.replace("configs/demo.toml", "configs/llama3-70b.toml") for word in words]
    words = ["2" if before == "--nproc-per-node" else word for before, word in zip(["", *words], words, strict=False)]
    words = ["20" if before == "--seconds" else word for before, word in zip(["", *words], words, strict=False)]
    start = words.index("octavo") + 1
    if "--shrink" in words:
        words += ["run.steps=6"]
    elif start < len(words) and words[start] in TRAINING and "--losses" not in words:
        words += FEW_STEPS if any(re.match(r"configs/(vit|vlm|dit)-digits", word) for word in words) else SMALL
    return words[1:] if words[0] == "octavo" else words


@pytest.mark.parametrize("command", [c for c in COMMANDS if reason_not_run(c) is None])
def test_it_runs_as_written(command, folder):
    words = runnable(command)
    for name in ("runs", "exported"):
        shutil.rmtree(folder / name, ignore_errors=True)
    if not set(words) & set(TRAINING):
        for name in ("looked", "demo", "inspected"):
            shutil.copytree(folder / "made" / "looked", folder / "runs" / name)
    if "--resume" in words:
        assert octavo(folder, *(word for word in words if word != "--resume")).returncode == 0
    done = watched(folder, *words) if words[0] == "watch" else octavo(folder, *words)
    assert done.returncode in ALLOWED_CODES.get(words[0], (0,)), done.stdout[-2000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    if "--json" in words:
        json.loads(done.stdout)


def test_what_is_not_run_is_still_quoted():
    for pattern in NOT_RUN:
        assert any(re.search(pattern, command) for command in COMMANDS), pattern
