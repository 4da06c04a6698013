"""Mistakes in the tables of a configuration, in words."""

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import ValidationError

from octavo.numerics.names import nearest
from octavo.train.config.sections import Section

EXPECTED_VALUES = {
    "optim.betas": "two numbers in [0, 1), as [0.9, 0.95]",
    "precision.skip": 'a list of patterns, as ["lm_head"]',
    "precision.only": 'a list of patterns, as ["*.mlp.*"]',
    "sample.prompts": 'a list of one text or more, as ["def "]',
    "inspect.what_if": 'a list of recipes, as ["blockwise"]',
    "precision.loss_scale": '"none" | "dynamic", or a number > 0',
}
"""Descriptions for settings where pydantic's message covers only a part, or one of two forms."""


def explain(error: ValidationError, tables: Mapping[str, Any], config: type[Section]) -> str:
    """Return the first mistake that pydantic found in the tables of a configuration, by key, with what to write."""
    first = error.errors()[0]
    model: Any = config
    key: list[str] = []
    for part in first["loc"]:
        if not (isinstance(model, type) and issubclass(model, Section)):
            break
        if isinstance(part, int):  # a table of a list
            continue
        fields: list[str] = list(model.model_fields)
        key.append(str(part))
        if part not in fields:
            kind = "section" if len(key) == 1 else "key"
            choices_text = f"; known here: {', '.join(fields)}"
            return f"unknown {kind} {'.'.join(key)}{nearest(str(part), fields) or choices_text}"
        model = _section(model.model_fields[str(part)].annotation)
    name = ".".join(key)
    if first["type"] == "missing" and isinstance(first["loc"][-1], str):
        return f"missing {'section' if len(key) == 1 else 'key'} {name}"
    if name in EXPECTED_VALUES:
        hint = nearest(first["input"], _choices(model)) if isinstance(first["input"], str) else ""
        return f"{name}: should be {EXPECTED_VALUES[name]}, got {tables[key[0]][key[1]]!r}{hint}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    got = f", got {first['input']!r}"
    choices = _choices(model)
    if choices and isinstance(first["input"], str):
        return f"{name}: should be {_join(choices)}{got}{nearest(first['input'], choices)}"
    message = first["msg"].removeprefix("Input ")
    return f"{name}: {message}{got}"


def _section(annotation: Any) -> Any:
    """The section of an optional one; else the annotation."""
    sections = [part for part in get_args(annotation) if isinstance(part, type) and issubclass(part, Section)]
    return sections[0] if sections else annotation


def _choices(annotation: Any) -> list[str]:
    """The strings a Literal (or a union with one) allows."""
    values = [value for value in get_args(annotation) if isinstance(value, str)]
    for part in get_args(annotation):
        values += _choices(part) if get_args(part) else []
    return values


def _join(choices: list[str]) -> str:
    return " | ".join(f'"{choice}"' for choice in choices)
