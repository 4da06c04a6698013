"""Completion of `section.key=` in shells, from the source of the sections: importing them takes seconds, for torch."""

import ast
import re
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
            # A section, which may be left out, or whose settings may differ on resume.
            kind = re.fullmatch(r"(?:(?:Free|Tunable)\[)?(\w+)(?: \| None)?\]?", ast.unparse(node.annotation))
            if kind and kind[1] in classes:
                yield from _of(classes, kind[1], f"{key}.")
            else:
                yield f"{key}="
