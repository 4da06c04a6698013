"""What the compiler makes of each Triton kernel, seen without a GPU: registers, spills, widths of memory accesses.

Triton compiles for a GPU that is not there, down to machine code, with the `ptxas` and `cuobjdump` of its own wheel.
One row per kernel, input dtype and fold at aligned shapes; the rows of sm_90 are kept in `results/sass/sm_90.json`,
and `tests/kernels/test_sass.py` fails when a change spills registers or narrows an access. `--write` renews that
file.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.environment import RESULTS
from octavo.kernels.quantize import QUANTIZE
from octavo.numerics import QuantSpec

CODES = {"e4m3": "*fp8e4nv", "e5m2": "*fp8e5"}
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)


def rows(capability: int) -> list[dict[str, Any]]:
    """Compile every quantizer for `sm_<capability>` and describe what came out."""
    from octavo.kernels.quantize import triton as kernels

    found = []
    for (text,) in QUANTIZE.cases.values():
        spec = QuantSpec.parse(text)
        for fold in ("none", "rows", "columns"):
            for launch in kernels.launches(spec, fold):
                compiled = compile_for(capability, launch, spec, fold)
                found.append({"spec": text, "fold": fold, "kernel": launch.kernel.fn.__name__} | describe(compiled))
    return found


def compile_for(capability: int, launch: Any, spec: QuantSpec, fold: str) -> Any:
    """Compile one launch for bf16 input, contiguous rows, pointers and sizes divisible by 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {
        "x": "*bf16",
        "fold": "*bf16" if fold == "none" else "*fp32",
        "amax": "*i32",
        "q": CODES[spec.format.name],
        "s": "*u8" if spec.scale_rule == "e8m0" else "*fp32",
    }
    constants = {**launch.constants, "stride_c": 1}
    names = launch.kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in constants}
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": launch.num_warps})


def describe(compiled: Any) -> dict[str, Any]:
    """Registers, stack and local bytes, and the global accesses by width, of a compiled kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    counts = Counter(INSTRUCTION.findall(code))
    resource = {key.lower(): int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    accesses = {op: n for op, n in sorted(counts.items()) if op.startswith(("LDG", "STG", "LDL", "STL"))}
    return resource | {"shared": compiled.metadata.shared, "instructions": counts.total(), "accesses": accesses}


def main(arguments: list[str]) -> None:
    """Print the table; with `--write`, keep it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks sass", description=__doc__)
    parser.add_argument("--capability", type=int, default=90, help="89, 90, 100 or 120")
    parser.add_argument("--write", action="store_true", help="renew results/sass/sm_<capability>.json")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("TRITON_INTERPRET=1 is set: kernels are interpreted then, not compiled; unset it")
    import triton

    table = rows(options.capability)
    result = {"triton": triton.__version__, "target": f"sm_{options.capability}", "rows": table}
    if options.json:
        print(json.dumps(result))
        return
    for row in table:
        accesses = " ".join(f"{op}×{n}" for op, n in row["accesses"].items())
        print(
            f"{row['spec']:<16} {row['fold']:<8} {row['kernel']:<15} {row['reg']:>3} registers  {row['stack']} stack  "
            f"{row['shared']:>6} shared  {row['instructions']:>5} instructions  {accesses}"
        )
    if options.write:
        path = RESULTS / "sass" / f"sm_{options.capability}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {path}")
