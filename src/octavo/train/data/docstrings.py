"""Conversations about the standard library, from its docstrings: embedded data for fine-tuning, without a download.

    system      You answer questions about Python's standard library.
    user        What does `json.dumps` do?
    assistant   Serialize ``obj`` to a JSON formatted ``str``.
    user        How is it called?
    assistant   json.dumps(obj, *, skipkeys=False, …)

Modules are parsed, never imported.
"""

import ast
import json
import warnings
from collections.abc import Iterator
from pathlib import PurePosixPath

SOURCE = "python-docstrings"
VERSION = b"python-docstrings 1"
"""Part of the fingerprint; changes with the conversations that a module gives."""
SYSTEM = "You answer questions about Python's standard library."


def conversations(name: str, text: str) -> list[str | None]:
    """The conversations about a module at the path `name`, as `chat.conversation_text` writes them."""
    module = ".".join(PurePosixPath(name).with_suffix("").parts).removesuffix(".__init__")
    if any(part.startswith("_") for part in module.split(".")):
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old escapes in strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    return [json.dumps(messages, ensure_ascii=False) for node in tree.body for messages in _of(module, node)]


def _of(prefix: str, node: ast.stmt) -> Iterator[list[dict[str, str]]]:
    """The conversations about a function or a class and its methods."""
    if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
        return
    name = f"{prefix}.{node.name}"
    if text := ast.get_docstring(node):
        turns = [(f"What does `{name}` do?", " ".join(text.split("\n\n")[0].split()))]
        if isinstance(node, ast.FunctionDef):
            turns.append(("How is it called?", f"{name}({ast.unparse(node.args)})"))
        messages = [{"role": "system", "content": SYSTEM}]
        for question, answer in turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield messages
    if isinstance(node, ast.ClassDef):
        for inner in node.body:
            yield from _of(name, inner)
