"""Arguments and options that commands share, and short forms to declare others."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer


def complete_setting(incomplete: str) -> list[str]:
    """Return the settings that begin so, as `optim.lr=`."""
    return [setting for setting in settings() if setting.startswith(incomplete)]


def settings() -> Iterator[str]:
    """Yield every setting of a configuration in the order of the sections, as `optim.lr=`."""
    # From the source of the sections: importing them takes seconds, for torch.
    folder = Path(__file__).parents[1] / "train" / "config"
    nodes = [node for path in sorted(folder.glob("*.py")) for node in ast.parse(path.read_text(encoding="utf-8")).body]
    yield from _of({node.name: node for node in nodes if isinstance(node, ast.ClassDef)}, "TrainConfig", "")


def _of(classes: dict[str, ast.ClassDef], name: str, prefix: str) -> Iterator[str]:
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign):
            key = f"{prefix}{ast.unparse(node.target)}"
            # A section, which may be left out, or whose settings may differ on resume.
            annotation = ast.unparse(node.annotation).replace("sections.", "")
            kind = re.fullmatch(r"(?:(?:Free|Tunable)\[)?(\w+)(?: \| None)?\]?", annotation)
            if kind and kind[1] in classes:
                yield from _of(classes, kind[1], f"{key}.")
            else:
                yield f"{key}="


def in_home(path: Path | None) -> Path | None:
    """Expand ~ in a path of the command line, which a shell does not expand within quotes."""
    try:
        return path and path.expanduser()
    except RuntimeError:
        raise typer.BadParameter(f"{path}: there is no such home directory") from None


def path_argument(name: str, help: str) -> Any:
    """Declare an argument that is a path."""
    return typer.Argument(metavar=name, help=help, show_default=False, callback=in_home)


def path_option(help: str, metavar: str | None = None) -> Any:
    """Declare an option that is a path."""
    return typer.Option(metavar=metavar, help=help, show_default=False, callback=in_home)


def option(help: str, metavar: str | None = None, **settings: Any) -> Any:
    """Declare an option whose help names its default."""
    return typer.Option(metavar=metavar, help=help, show_default=False, **settings)


def flag(name: str, help: str) -> Any:
    """Declare an option without a value."""
    return typer.Option(name, help=help)


Config = Annotated[Path, path_argument("CONFIG", "The run's configuration.")]

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SECTION.KEY=VALUE", help="Settings to change, as optim.lr=1e-3.", show_default=False,
        autocompletion=complete_setting,
    ),
]  # fmt: skip

Shrink = Annotated[
    bool,
    flag("--shrink", "The same architecture, small, on the source of Python's standard library: for two CPU cores."),
]
AsJson = Annotated[bool, flag("--json", "Print everything as JSON.")]


# What `--help` shows under each command: lines to type.


_LINES = {
    "octavo": """
  # BF16 against every part in FP8 on a small model; three to eight minutes on two CPU cores
  octavo demo
  # one run, into runs/<its name>; any setting can be given after the file
  octavo train configs/demo.toml precision.level=fp8 precision.recipe=mxfp8
  # a page in the browser that follows it
  octavo watch runs/demo
  # the configuration of a large model for your GPUs, with predicted time and memory
  octavo init --model llama3-8b --gpu h100 --gpus 8
  # the backend of each op on this machine, and why others are unavailable
  octavo doctor
  # predict on GPUs that you do not have: speed-up of each layer, time and memory of a step
  octavo plan configs/llama3-70b.toml --gpu h100 --gpus 64
  # on a GPU: measure which kernels are fastest, for all later runs
  octavo calibrate
""",
    "init": """
  # the models
  octavo init --list
  # writes llama3-8b.toml: batch, checkpointing and sharding that fit, with reasons and predicted figures
  octavo init --model llama3-8b --gpu h100 --gpus 8
  octavo init --model mixtral-8x7b --gpu h200 --gpus 64 --out runs/mixtral.toml
""",
    "train": """
  octavo train configs/demo.toml
  octavo train configs/demo.toml run.steps=50 optim.lr=1e-3 --out runs/short
  octavo train configs/demo.toml --out runs/short --resume
  octavo train configs/demo.toml precision.level=fp8 precision.recipe=mxfp8
  octavo train configs/demo.toml data.source='corpus/*.txt'
  # the architecture and precision of a large model, small enough for a CPU
  octavo train configs/llama3-8b.toml --shrink
  # eight GPUs: FSDP2, weights and gradients in FP8 on the wire
  torchrun --nproc-per-node 8 -m octavo train configs/demo.toml precision.level=fp8 parallel.fp8_comm=on
""",
    "watch": """
  octavo watch runs/demo
  # on another machine, through a tunnel: ssh -L 8421:127.0.0.1:8421 there
  octavo watch runs/demo --port 8421
""",
    "export": """
  octavo export runs/demo/checkpoints/step-000200 exported
  # then: AutoModelForCausalLM.from_pretrained("exported")
  # the FP8 values of training, for `vllm serve exported`
  octavo export runs/demo/checkpoints/step-000200 exported --to fp8-row --max-shard-size 5GB
""",
    "demo": """
  octavo demo
  octavo demo --steps 50 --recipe mxfp8 --out runs/mxfp8
  # products alone in FP8, and as many tokens as configs/demo.toml
  octavo demo --level fp8 --steps 200 optim.batch=8 optim.lr=3e-3
  octavo demo --seed 1 optim.lr=1e-3
""",
    "compare": """
  octavo compare configs/demo.toml --arm bf16 --arm rowwise:precision.level=fp8
  # settings after CONFIG are for all arms; these five seeds
  octavo compare configs/demo.toml run.steps=100 --seeds 1,2,3,5,8 --out runs/recipes \\
      --arm bf16 --arm "rowwise:precision.level=fp8" --arm "blockwise:precision.level=fp8 precision.recipe=blockwise"
  # in CI: exit code 0 only if the loss is at most 0.5 % worse, with confidence
  octavo compare configs/demo.toml --seeds 5 --margin 0.5 \\
      --arm bf16 --arm everything:precision.level=fp8+activations+optimizer
  # the effect of rounding alone: same run with two micro-batches
  octavo compare configs/demo.toml --arm bf16 --arm again:optim.micro_batches=2
  # losses of any trainer: {"baseline": [3.00, 3.02], "arms": {"fp8": [3.01, 3.02]}}
  octavo compare --losses losses.json --margin 1 --json
""",
    "inspect": """
  octavo train configs/demo.toml precision.level=fp8 inspect.every=50 'inspect.what_if=["tensorwise"]' --out runs/looked
  octavo inspect runs/looked
  octavo inspect runs/looked --step 100 --by underflow --top 40
  octavo inspect runs/looked/checkpoints/step-000200 --json > operands.json
""",
    "doctor": """
  octavo doctor
  octavo doctor --device cpu
  octavo doctor --json > doctor.json
  # every Triton kernel in every configuration against the reference, byte for byte
  octavo doctor --deep
  octavo doctor --deep --seconds 600 --only e4m3/row
""",
    "plan": """
  # memory of a training step by category, beside bf16 and each precision level; no GPU, no data, no weights
  octavo plan --memory configs/llama2-7b.toml
  octavo plan --memory configs/demo.toml precision.level=fp8 optim.batch=64 --limit 24
  octavo plan --memory configs/demo.toml --layers
  octavo plan --memory configs/demo.toml --json > plan.json
  # each linear, time and memory of a step, what fits, beside bf16; or --gpu my-gpu.toml, which describes one
  octavo plan configs/llama3-70b.toml --gpu h100 --gpus 64
  octavo plan configs/llama2-7b.toml optim.micro_batches=2 --gpu h200 --gpus 8 --json > plan.json
""",
    "calibrate": """
  # the products of Llama-sized linears; a minute or two on one GPU
  octavo calibrate
  # own linears: tokens, in_features, out_features
  octavo calibrate --shapes 8192,3072,9216 --shapes 8192,9216,3072 --recipe blockwise
""",
}
EXAMPLES = {name: f"\b\nExamples:{lines}" for name, lines in _LINES.items()}
"""By command. Click keeps line breaks after a backspace on a line."""
