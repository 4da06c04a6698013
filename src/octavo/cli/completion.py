"""Completion of `section.key=` in shells, from the source of the sections: importing them takes seconds, for torch."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = "TrainConfig"


def complete_setting(incomplete: str) -> list[str]:
    """Return the settings that begin so, as `optim.lr=`."""
    return [setting for setting in settings() if setting.startswith(incomplete)]


def settings() -> Iterator[str]:
    """Yield every setting of a configuration in the order of the sections, as `optim.lr=`."""
    folder = Path(__file__).parents[1] / "train" / "config"
    nodes = [node for path in sorted(folder.glob("*.py")) for node in ast.parse(path.read_text(encoding="utf-8")).body]
    yield from _of({node.name: node for node in nodes if isinstance(node, ast.ClassDef)}, ROOT, "")


def _of(classes: dict[str, ast.ClassDef], name: str, prefix: str) -> Iterator[str]:
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign):
            key = f"{prefix}{ast.unparse(node.target)}"
            kind = ast.unparse(node.annotation).removesuffix(" | None")  # of a section that may be left out
            if kind in classes:
                yield from _of(classes, kind, f"{key}.")
            else:
                yield f"{key}="
