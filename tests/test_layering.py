"""The layering of the package: who may import whom, what importing it costs, what a public name owes its reader."""

import ast
import inspect
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import octavo

SOURCE = Path(octavo.__file__).parent
LEVELS = {
    "_version": 0,
    "runtime": 0,
    "numerics": 0,
    "tensor": 1,
    "kernels": 2,
    "activations": 3,
    "optim": 3,
    "comm": 3,
    "compat": 7,
    "nn": 4,
    "planner": 5,
    "parallel": 5,
    "serving": 5,
    "inspect": 6,
    "integrations": 7,
    "train": 7,
    "experiments": 8,
    "cli": 9,
}
FRONT_DOORS = {"__init__", "__main__"}


def room(module: str) -> str:
    """octavo.nn.linear → nn"""
    return module.split(".")[1] if "." in module else "__init__"


def imports_of(path: Path) -> list[str]:
    """Every octavo module that a file imports, wherever in the file."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; imports are absolute here"
            modules = (SOURCE / Path(*(node.module or "").split(".")[1:])).is_dir()
            names += [f"{node.module}.{alias.name}" for alias in node.names] if modules else [node.module or ""]
    return [name for name in names if name.split(".")[0] == "octavo"]


FILES = sorted(SOURCE.rglob("*.py"))


def test_imports_go_downward_only() -> None:
    wrong = []
    for path in FILES:
        here = path.relative_to(SOURCE).with_suffix("").parts[0]
        for name in () if here in FRONT_DOORS else imports_of(path):
            there = room(name)
            if there not in LEVELS:
                wrong.append(f"{path} imports {name}: from the root package, or a room this test does not know")
            elif there not in (here, "_version") and LEVELS[there] >= LEVELS[here]:
                wrong.append(
                    f"{path} (level {LEVELS[here]}) imports {name} (level {LEVELS[there]}), which is not lower"
                )
    assert len(FILES) > 150 and not wrong, "\n".join(wrong)


def test_the_linear_is_readable_alone() -> None:
    path = SOURCE / "nn" / "linear.py"
    assert len(path.read_text().splitlines()) <= 150 and len(set(imports_of(path))) <= 6


def test_private_names_of_torch_are_behind_one_shim() -> None:
    """Operators (`torch._scaled_mm`, `torch._foreach_*`, `torch.ops`) are called where they are needed."""
    allowed = ("torch._scaled_mm", "torch._scaled_grouped_mm", "torch._foreach_", "torch.ops.", "torch.__version__")
    for path in FILES:
        if path.name == "torch_compat.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
            else:
                names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
            for name in names:
                private = re.fullmatch(r"torch(\.\w+)*\._\w+(\.\w+)*", name) and not name.startswith(allowed)
                assert not private, f"{path}:{node.lineno}: {name} belongs in runtime/torch_compat.py"


def test_there_are_no_import_cycles() -> None:
    graph = {}
    for path in FILES:
        parts = path.relative_to(SOURCE).with_suffix("").parts
        module = ".".join(("octavo", *(p for p in parts if p != "__init__")))
        graph[module] = set(imports_of(path))
    known = set(graph)
    resolved = {
        module: {n if n in known else n.rpartition(".")[0] for n in names} & known - {module, "octavo"}
        for module, names in graph.items()
        if module != "octavo"
    }
    finished: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " → ".join((*trail, module))
        if module not in finished:
            for other in resolved.get(module, ()):
                # A package's __init__ re-exports its own files; that is its job, not a cycle.
                if not module.startswith(f"{other}."):
                    visit(other, (*trail, module))
            finished.add(module)

    for module in resolved:
        visit(module, ())


def test_files_and_functions_stay_short() -> None:
    for path in FILES:
        text = path.read_text()
        assert text.count("\n") <= 400, path
        assert path.name != "utils.py", path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 80, f"{path}: {node.name} has {length} lines"


def test_import_is_lean() -> None:
    code = (
        "import gc, sys, time, torch; before = set(sys.modules);"
        "gc.disable();"  # torch's objects are looked through every so often, and the turn may come here
        "start = time.process_time(); import octavo;"
        "took = time.process_time() - start;"
        "heavy = {'triton', 'transformers', 'lightning', 'datasets', 'plotly', 'rich', 'typer', 'pydantic'};"
        "print(took, torch.cuda.is_initialized(), sorted(heavy & (set(sys.modules) - before)))"
    )
    for _ in range(3):  # other tests that run beside slow a core down
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        took, initialized, heavy = out.split(maxsplit=2)
        if float(took) < 0.2:
            break
    assert float(took) < 0.2
    assert initialized == "False"
    assert heavy.strip() == "[]"


def test_import_does_not_import_torch() -> None:
    code = "import sys, octavo; dir(octavo); print(sorted({'torch', 'numpy', 'triton', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_dir_lists_public_names_and_every_subpackage() -> None:
    folder = Path(octavo.__file__).parent
    packages = {path.parent.name for path in folder.glob("*/__init__.py")} - {"cli"}
    assert set(dir(octavo)) == {*octavo.__all__, *packages}
    assert all(getattr(octavo, name) is not None for name in dir(octavo))
    with pytest.raises(AttributeError, match="no attribute 'convrt'"):
        octavo.convrt  # noqa: B018


def test_root_names_are_few_and_documented() -> None:
    assert len(octavo.__all__) <= 13
    for name in octavo.__all__:
        thing = getattr(octavo, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert inspect.getdoc(thing), name


def test_one_thread_at_a_time_imports_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others that import a package and a module of it at once would see either half imported."""
    running: list[str] = []
    together: list[tuple[str, ...]] = []

    def slow(name: str) -> ModuleType:
        running.append(name)
        together.append(tuple(running))
        time.sleep(0.02)
        running.remove(name)
        return import_module(name)

    monkeypatch.setattr(octavo, "import_module", slow)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(octavo.__getattr__, ["nn", "convert", "kernels", "report"]))
    assert len(together) == 4 and all(len(names) == 1 for names in together), together


def test_type_checkers_see_the_public_names_and_no_others() -> None:
    """A `__getattr__` that they see would make every misspelt name an Any."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    assert not [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "__getattr__"]
    (seen,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    names = {alias.asname or alias.name for node in seen.body for alias in node.names}  # type: ignore[attr-defined]
    assert names | {"__version__"} == set(dir(octavo))
