"""Parse the text of PTX that Triton emits for one kernel into instructions.

    @!%p3 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd7 + 16 ];
     │    │  └── parts ──┘  └────────── operands ───────────────┘
     │    └ name
     └ predicate, negated

Operands stay text, but for the vectors in braces, which are tuples. Scopes of inline assembly are flat: Triton emits
one block after the other, each of which writes its names before it reads them.
"""

import re
from dataclasses import dataclass

Operand = str | tuple[str, ...]


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: Such as "ld".
        parts: What follows the name, such as ("global", "v4", "b32").
        operands: Registers, immediates, addresses "[…]", labels; vectors are tuples.
        predicate: Register that masks it, or None.
        negated: Whether it runs where the predicate is false.
        line: Line of the text, from 1.
        text: The instruction as it was written, on one line.
    """

    name: str
    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    predicate: str | None
    negated: bool
    line: int
    text: str

    @property
    def type(self) -> str:
        """The last part, which is the type of most instructions."""
        return self.parts[-1] if self.parts else ""


@dataclass(frozen=True)
class Program:
    """One kernel.

    Attributes:
        name: Of the kernel.
        parameters: Name and size in bytes of each parameter, in order.
        threads: Threads per CTA.
        instructions: In order.
        labels: Index of the instruction after each label.
        tables: Labels of each table of branch targets.
    """

    name: str
    parameters: tuple[tuple[str, int], ...]
    threads: int
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    tables: dict[str, tuple[str, ...]]


_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)[^,]*?(\w+)(?:\[(\d+)\])?\s*(?:,|$)", re.DOTALL)
_LABEL = re.compile(r"\s*(\$?\w+):(?!:)")
_INSTRUCTION = re.compile(r"(?:@(!?)(\S+)\s+)?([a-z]\w*)((?:\.[\w:]+)*)\s*(.*)$", re.DOTALL)


def parse(text: str) -> Program:
    """Parse the PTX of a module with one kernel.

    Raises:
        ValueError: If the text is not PTX as expected, with the line.
    """
    entry = _ENTRY.search(text)
    threads = re.search(r"\.reqntid\s+(\d+)", text)
    if entry is None or threads is None:
        raise ValueError("the PTX has no .entry with .reqntid: is it the text of a kernel that Triton compiled?")
    body = text.index("{", threads.end())
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    tables: dict[str, tuple[str, ...]] = {}
    last = ""
    for line, statement in _statements(text, body):
        if statement.endswith(":"):
            last = statement[:-1]
            labels[last] = len(instructions)
        elif statement.startswith(".branchtargets"):
            tables[last] = tuple(re.findall(r"[$\w]+", statement)[1:])
        elif not statement.startswith("."):
            instructions.append(_instruction(statement, line))
    parameters = tuple((name, int(bits) // 8 * int(count or 1)) for bits, name, count in _PARAMETER.findall(entry[2]))
    return Program(entry[1], parameters, int(threads[1]), tuple(instructions), labels, tables)


def _statements(text: str, start: int) -> list[tuple[int, str]]:
    """Return the statements and labels (with their colon) of the body that begins at an opening brace."""
    statements: list[tuple[int, str]] = []
    depth, current, begun = 0, "", 0
    first = text.count("\n", 0, start) + 1
    for line, content in enumerate(text[start:].splitlines(), first):
        content = content.split("//")[0]
        if content.strip().startswith((".loc", ".file", ".section")):
            continue
        while content:
            if not current.strip():
                current, begun, content = "", line, content.lstrip()
                label = _LABEL.match(content)
                if label is not None:
                    statements.append((line, label[1] + ":"))
                    content = content[label.end() :]
                    continue
                if content[:1] in ("{", "}"):
                    depth += 1 if content[0] == "{" else -1
                    content = content[1:]
                    if depth == 0:
                        return statements
                    continue
            part, semicolon, content = content.partition(";")
            current += part + " "
            if semicolon:
                statements.append((begun, " ".join(current.split())))
                current = ""
    raise ValueError(f"line {first}: the kernel's body has no end")


def _instruction(statement: str, line: int) -> Instruction:
    match = _INSTRUCTION.match(statement)
    if match is None:
        raise ValueError(f"line {line}: not an instruction: {statement!r}")
    negation, predicate, name, parts, rest = match.groups()
    return Instruction(
        name=name,
        parts=tuple(part for part in parts.split(".") if part),
        operands=tuple(_operand(text) for text in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)),
        predicate=predicate,
        negated=bool(negation),
        line=line,
        text=statement,
    )


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(name.strip() for name in text[1:-1].split(","))
    return "".join(text.split())
