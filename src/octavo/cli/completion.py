"""Completion of `section.key=` in shells, from the source of the sections: importing them takes seconds, for torch."""

import ast
from collections.abc import Iterator
from pathlib import Path

FILES = ("run_config.py", "sections.py", "parallel_section.py")
ROOT = "TrainConfig"


def complete_setting(incomplete: str) -> list[str]:
    """Return the settings that begin so, as `optim.lr=`."""
    return [setting for setting in settings() if setting.startswith(incomplete)]


def settings() -> Iterator[str]:
    """Yield every setting of a configuration in the order of the sections, as `optim.lr=`."""
    folder = Path(__file__).parents[1] / "train" / "config"
    nodes = [node for name in FILES for node in ast.parse((folder / name).read_text(encoding="utf-8")).body]
    yield from _of({node.name: node for node in nodes if isinstance(node, ast.ClassDef)}, ROOT, "")


def _of(classes: dict[str, ast.ClassDef], name: str, prefix: str) -> Iterator[str]:
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign):
            key, kind = f"{prefix}{ast.unparse(node.target)}", ast.unparse(node.annotation)
            if kind in classes:
                yield from _of(classes, kind, f"{key}.")
            else:
                yield f"{key}="
