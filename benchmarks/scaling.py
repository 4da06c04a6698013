"""Many GPUs without one: memory of a rank, bytes on the wire and modelled time on 8, 64 and 512 ranks; docs/scaling.md.

Every model is trained for one step by the code that would train it, whole, as one rank of a world that is not there
(`benchmarks.scaling_trace`). What comes of its bytes in seconds is a model (`benchmarks.scaling_time`), whose numbers
can be set; with `--document` only they are changed, and the document is written anew from the result file.

  python -m benchmarks scaling
  python -m benchmarks scaling --document --between 400 50 --fp8 900
  python -m benchmarks scaling --models Llama-3-8B --worlds 8 --out /tmp/short
  python -m benchmarks scaling --arms "fp8+activations+optimizer, all FP8"
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import RESULTS, environment, unfinished, write_json, write_text
from benchmarks.figures import save
from benchmarks.scaling_document import IMAGE, document, picture
from benchmarks.scaling_hybrid import FILE as HYBRID_FILE
from benchmarks.scaling_time import Rates
from benchmarks.scaling_trace import ARMS, build, facts, fake_world, sharded, trace
from octavo.planner.collective_cost import GPUS_PER_MACHINE

Row = dict[str, Any]
ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "scaling.md"
FILE = "scaling.json"
TOKENS = 8192
_LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": TOKENS, "rope_theta": 500000.0}


def _llama(width: int, inner: int, layers: int, heads: int) -> Row:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    return {"kind": "llama", "config": sizes | {"num_attention_heads": heads, **_LLAMA}}


MODELS: dict[str, Row] = {
    "Llama-3-8B": _llama(4096, 14336, 32, 32),
    "Command-R 35B": {
        "kind": "cohere",
        "config": {
            "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40, "num_attention_heads": 64,
            "num_key_value_heads": 64, "vocab_size": 256000, "max_position_embeddings": TOKENS, "logit_scale": 0.0625,
        },
    },
    "Llama-3-70B": _llama(8192, 28672, 80, 64),
    "Llama-3.1-405B": _llama(16384, 53248, 126, 128),
}  # fmt: skip
"""Type and sizes of each model, as its publisher gives them; of the embedding, Command-R's is also the head."""
WORLDS = (8, 64, 512)


def placements(worlds: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
    """(ranks, copies, whether blocks are recomputed) of the traces of a model in each arm."""
    for world in worlds:
        yield world, 1, False
        yield world, 1, True
        if world > GPUS_PER_MACHINE:
            yield world, world // GPUS_PER_MACHINE, True


def traced(name: str, worlds: Sequence[int], arms: Sequence[str]) -> Iterator[Row]:
    """Rows of the result file for a model, one after the other."""
    for arm in (arm for arm in ARMS.values() if arm.name in arms):
        model = build(MODELS[name]["kind"], MODELS[name]["config"], arm)
        for world, replicas, recompute in placements(worlds):
            with fake_world(world):
                row = trace(sharded(model, arm, replicas=replicas, recompute=recompute), arm, tokens=TOKENS)
            about = {"model": name, "arm": arm.name, "world": world, "replicas": replicas, "recompute": recompute}
            yield about | row


def main(arguments: list[str]) -> None:
    """Trace every model, write `results/simulated/scaling.json` and the document."""
    parser = _parser()
    options = parser.parse_args(arguments)
    for name in ("bf16", "fp8", "inside", "between", "efficiency"):
        value = getattr(options, name)
        if min(value if isinstance(value, list) else [value]) <= 0:
            parser.error(f"--{name} is above 0; got {value}")
    if any(world % GPUS_PER_MACHINE or world < GPUS_PER_MACHINE for world in options.worlds):
        parser.error(f"--worlds are whole machines of {GPUS_PER_MACHINE} ranks; got {options.worlds}")
    if options.out is None and (set(options.models) != set(MODELS) or set(options.worlds) != set(WORLDS)):
        parser.error("the document needs all models and worlds; for some of them give --out")
    path = (options.out or RESULTS / "simulated") / FILE
    rates = _rates(options)
    if options.document:
        content = json.loads(path.read_text())
        write_json(path, content | {"rates": asdict(rates)})
    else:
        file_content = environment(torch.device("cpu"))
        about = {name: file_content[name] for name in ("octavo", "torch", "transformers", "python", "date")}
        rows = [] if set(options.arms) == set(ARMS) else json.loads(path.read_text())["rows"]
        rows = [row for row in rows if row["arm"] not in options.arms]
        content = {"environment": about, "rates": asdict(rates), "models": {}, "rows": rows}
        for name in options.models:
            sizes = facts(build(MODELS[name]["kind"], MODELS[name]["config"], ARMS["fp8"]), TOKENS)
            content["models"][name] = MODELS[name] | {"facts": sizes}
            for row in traced(name, options.worlds, options.arms):
                content["rows"].append(row)
                ranks = f"{row['world']} ranks, {row['replicas']} copies{', recomputed' if row['recompute'] else ''}"
                print(f"{name:<15} {row['arm']:<20} {ranks:<35} {row['peak'] / 2**30:8.1f} GiB", flush=True)
                write_json(unfinished(path), content)
        write_json(path, content)
        unfinished(path).unlink()
    if options.out is None:
        publish(path)
        print(f"written: {DOCUMENT.relative_to(ROOT)}")


def publish(path: Path) -> None:
    """Write the document and its figure from a result file."""
    content = json.loads(path.read_text())
    hybrid = path.parent / HYBRID_FILE
    write_text(DOCUMENT, document(content, json.loads(hybrid.read_text()) if hybrid.exists() else None))
    save(picture(content), DOCUMENT.parent / IMAGE)


def _rates(options: argparse.Namespace) -> Rates:
    return replace(
        Rates(), bf16=options.bf16 * 1e12, fp8=options.fp8 * 1e12, inside=options.inside * 1e9,
        between=tuple(rate * 1e9 for rate in options.between), efficiency=options.efficiency,
        hop_inside=options.hops[0] * 1e-6, hop_between=options.hops[1] * 1e-6,
    )  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    usual = Rates()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks scaling", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="all by default")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="others stay as they were traced")
    parser.add_argument("--worlds", nargs="+", type=int, default=list(WORLDS), help="ranks, multiples of 8 (8 64 512)")
    parser.add_argument("--out", type=Path, help="folder of the results, other than benchmarks/results/simulated")
    parser.add_argument("--document", action="store_true", help="trace nothing: the document, from the result file")
    parser.add_argument("--bf16", type=float, default=usual.bf16 / 1e12, help="TFLOP/s of bf16 products (%(default)g)")
    parser.add_argument("--fp8", type=float, default=usual.fp8 / 1e12, help="TFLOP/s of FP8 products (%(default)g)")
    parser.add_argument("--inside", type=float, default=usual.inside / 1e9, help="NVLink, GB/s a GPU (%(default)g)")
    parser.add_argument(
        "--between", nargs="+", type=float, default=[rate / 1e9 for rate in usual.between],
        help="network, Gb/s a GPU (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--efficiency", type=float, default=usual.efficiency, help="share of a link (%(default)g)")
    parser.add_argument(
        "--hops", nargs=2, type=float, default=[usual.hop_inside * 1e6, usual.hop_between * 1e6],
        help="microseconds from one GPU, and from one machine, to the next (%(default)s)",
    )  # fmt: skip
    return parser
