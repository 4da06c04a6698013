"""The layering of the package: who may import whom, what importing it costs, what a public name owes its reader."""

import ast
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

import octavo

SOURCE = Path(octavo.__file__).parent
LEVELS = {
    "_version": 0, "runtime": -1, "numerics": 0, "tensor": 1, "kernels": 2, "activations": 3, "optim": 3, "comm": 3,
    "compat": 7, "nn": 4, "planner": 5, "parallel": 5, "serving": 5, "inspect": 6, "integrations": 7, "train": 7,
    "experiments": 8, "cli": 9,
}  # fmt: skip
FRONT_DOORS = {"__init__", "__main__"}


def room(module):
    """octavo.nn.linear → nn"""
    return module.split(".")[1] if "." in module else "__init__"


@cache
def tree_of(path):
    """The parsed file; several tests walk it."""
    return ast.parse(path.read_text())


def imports_of(path):
    """Every octavo module that a file imports, wherever in the file."""
    names = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; imports are absolute here"
            modules = (SOURCE / Path(*(node.module or "").split(".")[1:])).is_dir()
            names += [f"{node.module}.{alias.name}" for alias in node.names] if modules else [node.module or ""]
    return [name for name in names if name.split(".")[0] == "octavo"]


FILES = sorted(SOURCE.rglob("*.py"))


def test_imports_go_downward_only():
    wrong = []
    for path in FILES:
        here = path.relative_to(SOURCE).with_suffix("").parts[0]
        for name in () if here in FRONT_DOORS else imports_of(path):
            there = room(name)
            if there not in LEVELS:
                wrong.append(f"{path} imports {name}: from the root package, or a room this test does not know")
            elif there not in (here, "_version") and LEVELS[there] >= LEVELS[here]:
                wrong.append(f"{path} (level {LEVELS[here]}) imports {name}, whose level {LEVELS[there]} is not lower")
    assert len(FILES) > 150 and not wrong, "\n".join(wrong)


LASTING_PRIVATE_NAMES = {
    "tensors": {"_base", "_cdata", "_make_wrapper_subclass", "_version"},
    "modules": {
        "_backward_hooks", "_backward_pre_hooks", "_buffers", "_call_impl", "_ConvNd", "_forward_hooks",
        "_forward_pre_hooks", "_modules", "_non_persistent_buffers_set", "_parameters",
    },
    "ops and autograd": {
        "_foreach_div_", "_foreach_mul_", "_assert_async", "_foreach_copy_",
        "_foreach_norm", "_scaled_grouped_mm", "_scaled_mm", "_scaled_mm_v2", "_schema",
        "_sequence_nr", "_unsafe_view",
    },
    "transformers and accelerate": {
        "_apply_gate", "_attn_implementation", "_custom_objects", "_experts_implementation", "_hf_peft_config_loaded",
        "_keys_to_ignore_on_save", "_name_or_path", "_supports_attention_backend",
    },
    "torchtitan": {"_owner"},
    "a convention for optimizers, and namedtuple": {"_no_weight_decay", "_replace"},
}  # fmt: skip
"""Private names of other packages that are the same in all supported releases, or that are read with a default."""


def test_private_names_of_torch_are_behind_one_shim():
    lasting = {name for names in LASTING_PRIVATE_NAMES.values() for name in names}
    own = set()
    used = []
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            names = []
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(attr=name) if name.startswith("_"):
                    names = [] if ast.unparse(node).startswith(("aten.", "torch.ops.")) else [name]
                case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, name, *_]):
                    names = [ast.unparse(name).strip("f'")]
                case ast.ImportFrom(module=module):
                    names = [*(module or "").split("."), *(alias.name for alias in node.names)]
                case ast.Import():
                    names = [part for alias in node.names for part in alias.name.split(".")]
            if path != SOURCE / "runtime" / "torch_compat.py":
                private = (name for name in names if name.startswith("_") and not name.startswith("__"))
                used += [(name, f"{path}, line {node.lineno}: {name}") for name in private]
    wrong = [place for name, place in used if name not in own | lasting]
    assert not wrong, "move them into octavo.runtime.torch_compat:\n" + "\n".join(wrong)


FACTORIES = {
    *("zeros", "ones", "empty", "full", "tensor", "scalar_tensor", "arange", "linspace", "logspace", "eye"),
    *("rand", "randn", "randint", "randperm", "empty_strided"),
}


def test_new_tensors_name_their_device():
    """Without one they lie where the user's `torch.set_default_device` says."""
    wrong = []
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name), keywords=keywords):
                    given = {keyword.arg for keyword in keywords}  # None: **options
                    if name in FACTORIES and not given & {"device", "out", None}:
                        wrong.append(f"{path}, line {node.lineno}: {ast.unparse(node)}")
    assert not wrong, "name a device:\n" + "\n".join(wrong)


def test_the_linear_is_readable_alone():
    path = SOURCE / "nn" / "linear.py"
    assert len(path.read_text().splitlines()) <= 225 and len(set(imports_of(path))) <= 14


def test_there_are_no_import_cycles():
    graph = {}
    for path in FILES:
        parts = path.relative_to(SOURCE).with_suffix("").parts
        module = ".".join(("octavo", *(p for p in parts if p != "__init__")))
        graph[module] = set(imports_of(path))
    known = set(graph)
    edges = {}
    for module, names in graph.items():
        others = {name if name in known else name.rpartition(".")[0] for name in names} & known - {module, "octavo"}
        # A package's __init__ re-exports its own files; that is its job, not a cycle.
        edges[module] = {other for other in others if not module.startswith(f"{other}.")}
    TopologicalSorter(edges).prepare()  # raises a CycleError with the modules of a cycle


def test_files_and_functions_stay_short():
    benchmarks = Path(__file__).parents[1] / "benchmarks"
    for path in (*FILES, *benchmarks.rglob("*.py")):
        assert path.read_text().count("\n") <= 800, path
        assert path.name != "utils.py", path
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 80, f"{path}: {node.name} has {length} lines"


def test_import_is_lean():
    code = (
        "import sys, time; start = time.process_time(); import octavo; dir(octavo); took = time.process_time() - start;"
        "tools = {'transformers', 'lightning', 'datasets', 'plotly', 'rich', 'typer', 'pydantic'};"
        "print(took, sorted(({'torch', 'numpy', 'triton'} | tools) & set(sys.modules)))"
    )
    for _ in range(3):  # other tests that run beside slow a core down
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        took, heavy = out.split(maxsplit=1)
        if float(took) < 0.2:
            break
    assert float(took) < 0.2
    assert heavy == "[]\n"


def test_dir_lists_public_names_and_every_subpackage():
    folder = Path(octavo.__file__).parent
    packages = {path.parent.name for path in folder.glob("*/__init__.py")} - {"cli"}
    assert set(dir(octavo)) == {*octavo.__all__, *packages} and len(octavo.__all__) <= 13
    assert all(getattr(octavo, name) is not None for name in dir(octavo))
    with pytest.raises(AttributeError, match="no attribute 'convrt'"):
        octavo.convrt  # noqa: B018


def test_one_thread_at_a_time_imports_names(monkeypatch):
    """Others that import a package and a module of it at once would see either half imported."""
    running = []
    together = []

    def slow(name):
        running.append(name)
        together.append(tuple(running))
        time.sleep(0.02)
        running.remove(name)
        return import_module(name)

    monkeypatch.setattr(octavo, "import_module", slow)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(octavo.__getattr__, ["nn", "convert", "kernels", "report"]))
    assert len(together) == 4 and all(len(names) == 1 for names in together), together


def test_type_checkers_see_the_public_names_and_no_others():
    """A `__getattr__` that they see would make every misspelt name an Any."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    assert not [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "__getattr__"]
    (seen,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    names = {alias.asname or alias.name for node in seen.body for alias in node.names}
    assert names | {"__version__"} == set(dir(octavo))
