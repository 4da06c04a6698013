"""docs/settings.md: every setting of `octavo train`, read from the pydantic sections and the docstrings in them."""

import ast
import inspect
import json
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from benchmarks import command, pages
from benchmarks.environment import write_text
from octavo.train.config.run_config import TrainConfig
from octavo.train.config.sections import Section

DOCUMENT = Path(__file__).parent.parent / "docs" / "settings.md"
HEAD = """# Settings

Generated from the sections in `src/octavo/train/config` by `python -m benchmarks settings`; edit nothing here. A
setting is written as `key = value` in its section of a TOML file, or as `section.key=value` on the command line
([training](training.md)). An unknown key, a wrong type and a value out of range raise an error before anything runs.
"""
NAMES = {int: "integer", float: "number", bool: "true, false", str: "text", dict: "table", tuple: "list", list: "list"}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def docstrings(section: type[Section]) -> dict[str, str]:
    body = ast.parse(inspect.getsource(section)).body[0].body
    return {
        field.target.id: inspect.cleandoc(text.value.value).replace("\n", " ").replace("  ", " ")
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def type_text(annotation: Any, metadata: Any = ()) -> str:
    """What a field accepts, such as `integer ≥ 1` or `"none"`, `"full"`."""
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(type_text(part) for part in get_args(annotation) if part is not NoneType)
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in get_args(annotation))
    if hasattr(annotation, "__metadata__"):
        field = FieldInfo.from_annotation(annotation)
        return type_text(field.annotation, field.metadata)
    if get_origin(annotation) is list and get_origin(get_args(annotation)[0]) is Literal:
        return f"list of {type_text(get_args(annotation)[0])}"
    name = NAMES[get_origin(annotation) or annotation]
    limits = [(sign, getattr(limit, key)) for limit in metadata for key, sign in BOUNDS.items() if hasattr(limit, key)]
    return " ".join([name, ", ".join(f"{sign} {limit}" for sign, limit in limits)]).rstrip()


def table(name: str, section: type[Section]) -> str:
    rows, texts, nested = [], docstrings(section), ""
    for key, field in section.model_fields.items():
        sections = sections_in(field.annotation)
        if field.annotation in sections:
            nested += table(f"{name}.{key}", field.annotation)
            continue
        nested += "".join(table(f"[[{name}.{key}]]", part) for part in sections)
        value = "–" if field.is_required() or field.default is None else f"`{json.dumps(field.default)}`"
        default = "required" if field.is_required() else value
        rows.append((f"`{key}`", type_text(field.annotation, field.metadata), default, texts[key]))
    return f"\n## {name}\n\n{pages.table(('key', 'value', 'default', ''), rows, 'l')}{nested}"


def sections_in(annotation: Any) -> list[type[Section]]:
    parts = (annotation, *get_args(annotation))
    return [part for part in parts if isinstance(part, type) and issubclass(part, Section)]


def document() -> str:
    fields = TrainConfig.model_fields.items()
    return HEAD + "".join(table(name, *sections_in(field.annotation)) for name, field in fields)


def main(arguments: list[str]) -> None:
    command("settings", __doc__).parse_args(arguments)
    write_text(DOCUMENT, document())
    print(f"written to {DOCUMENT}")
