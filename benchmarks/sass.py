"""What the compiler makes of each Triton kernel, without a GPU: registers, spills, accesses, instructions, with `ptxas`
and `cuobjdump` of Triton's wheel. `results/sass/sm_90.json` keeps rows per version, for `tests/kernels/test_sass.py`.
For another Triton: `PYTHONPATH=.venv/triton-3.6 python -m benchmarks sass`.
"""

import json
import multiprocessing
import os
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import command
from benchmarks.environment import RESULTS, write_text
from benchmarks.sass_code import Code

if TYPE_CHECKING:
    from benchmarks.variants import Variant

GOLDEN = RESULTS / "sass" / "sm_90.json"
CAPABILITIES = (89, 90, 100, 120)


@cache
def variants(capability: int) -> tuple["Variant", ...]:
    """Every kernel × case × configuration that the backends can launch on a device of this compute capability."""
    from benchmarks.variants import ALL, BY_TARGET

    return tuple(chain.from_iterable(of(capability) if of in BY_TARGET else of() for of in ALL))


def rows(capability: int, indices: list[int], jobs: int) -> list[dict[str, Any]]:
    """Compile and describe variants for `sm_<capability>` in parallel; equal code of several cases once."""
    first: dict[str, int] = {}
    same = {i: first.setdefault(_identity(variants(capability)[i]), i) for i in indices}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        described = pool.map(_row, first.values(), repeat(capability), chunksize=2)
        by_variant = dict(zip(first.values(), described, strict=True))
    return [by_variant[same[i]] | _named(variants(capability)[i]) for i in indices]


def _identity(variant: "Variant") -> str:
    launch = variant.launch
    kernel = f"{launch.kernel.fn.__module__} {launch.kernel.fn.__name__}"
    return repr((kernel, launch.constants, launch.num_warps, launch.num_stages, variant.types, variant.equal_to_1,
                 variant.tile, variant.trips, variant.device_bytes))  # fmt: skip


def _row(index: int, capability: int) -> dict[str, Any]:
    return describe(variants(capability)[index], capability)


def _named(variant: "Variant") -> dict[str, Any]:
    """What names the row of a variant; its shape is the tile, the warps and stages, as in `4x1024 w8 s3`."""
    launch = variant.launch
    sizes = "x".join(str(v) for k, v in launch.constants.items() if k.startswith("TILE_"))
    return {
        "op": variant.op, "case": variant.case, "config": variant.config, "kernel": launch.kernel.fn.__name__,
        "shape": f"{sizes} w{launch.num_warps} s{launch.num_stages}",
    }  # fmt: skip


def compile_for(capability: int, variant: "Variant") -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    launch = variant.launch
    constants = {**launch.constants, **dict.fromkeys(variant.equal_to_1, 1)}
    names = launch.kernel.arg_names
    signature = {name: "constexpr" if name in constants else variant.types.get(name, "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] in "*i"}
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": False}
    source = (GluonASTSource if launch.kernel.is_gluon() else ASTSource)(
        fn=launch.kernel, signature=signature, constexprs=constants, attrs=aligned
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def describe(variant: "Variant", capability: int) -> dict[str, Any]:
    name = _named(variant)
    try:
        compiled = compile_for(capability, variant)
    except Exception as error:  # whatever the compiler raises is a row of the table
        return name | {"error": " ".join(str(error.__cause__ or error).split()[-40:])}
    code_text, resources = _disassembled(compiled.asm["cubin"])
    code = Code.parse(code_text)
    per_element = code.per_element(variant.launch.num_warps, variant.tile, variant.trips)
    return {
        **name, **resources, "shared": compiled.metadata.shared, "accesses": code.accesses, "matrix": code.matrix,
        "step": step_of(code),
        **{key: round(value, 3) for key, value in per_element.items()}, "bytes": round(variant.device_bytes, 4),
    }  # fmt: skip


def step_of(code: Code) -> dict[str, Any] | None:
    """A product's loop on Hopper: instructions per 4 QGMMA, and how many groups each wait leaves pending."""
    products = sum(i.op == "QGMMA" for i in code.contraction)
    if not products:
        return None
    waits = [int(i.operands.rpartition("0x")[2], 16) for i in code.contraction if i.name.startswith("WARPGROUP.DEPBAR")]
    return {"per_4_qgmma": round(4 * len(code.contraction) / products, 1), "pending": waits}


def _disassembled(cubin: bytes) -> tuple[str, dict[str, int]]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    return code, {key.lower(): int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}


def table(code_rows: list[dict[str, Any]], capability: int) -> None:
    print(f"sm_{capability}: i/el instructions, B/el bytes of device memory")
    print(f"{'op case':<52} {'kernel':<16} {'tile':<20} reg   shared  i/el  B/el  accesses")
    for row in code_rows:
        label = f"{row['op'] + ' ' + row['case']:<52} {row['kernel']:<16} {row['config']} {row['shape']:<18}"
        if "error" in row:
            print(f"{label} DOES NOT COMPILE: {row['error']}")
            continue
        accesses = " ".join(f"{op}×{n}" for op, n in (row["accesses"] | row["matrix"]).items())
        spilled = f"  SPILLS {row['stack']} stack {row['local']} local" if row["stack"] or row["local"] else ""
        print(
            f"{label} {row['reg']:>3} {row['shared']:>8} {row['instructions']:>5.1f} {row['bytes']:>5.2f}  "
            f"{accesses}{spilled}"
        )


def keep(code_rows: list[dict[str, Any]], version: str) -> None:
    """Renew these rows of one Triton version in the golden file; drop rows of variants that are no more."""
    tables = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    known = {_key(row): row for row in (*tables.get(version, ()), *code_rows)}
    tables[version] = [known[key] for variant in variants(90) if (key := _key(_named(variant))) in known]
    texts = [f'"{v}": [\n' + ",\n".join(map(json.dumps, its_rows)) + "\n]" for v, its_rows in sorted(tables.items())]
    write_text(GOLDEN, "{" + ",\n".join(texts) + "}\n")


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("op", "case", "config", "kernel"))


def main(arguments: list[str]) -> None:
    parser = command("sass", __doc__)
    add = parser.add_argument
    add("--capability", type=int, choices=CAPABILITIES, nargs="+", default=CAPABILITIES)
    add("--default", action="store_true", help="only the default configuration of each kernel")
    add("--only", default=[""], nargs="+", help="only rows whose 'op case kernel' contains one of these")
    add("--jobs", type=int, default=min(os.cpu_count() or 1, 8))
    add("--write", action="store_true", help="renew what is compiled in results/sass/sm_90.json")
    add("--json", action="store_true", help="print JSON, one list of rows per target")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("TRITON_INTERPRET=1 is set: kernels are interpreted then, not compiled; unset it")
    import triton

    by_capability = {}
    for capability in options.capability:
        indices = []
        for index, v in enumerate(variants(capability)):
            name = f"{v.op} {v.case} {v.launch.kernel.fn.__name__}"
            if not (options.default and v.config) and any(text in name for text in options.only):
                indices.append(index)
        by_capability[capability] = rows(capability, indices, options.jobs)
    if options.json:
        print(json.dumps({"triton": triton.__version__, "targets": by_capability}))
        return
    for capability, its_rows in by_capability.items():
        table(its_rows, capability)
    if options.write:
        keep(by_capability[90], triton.__version__)
        print(f"written to {GOLDEN}")
