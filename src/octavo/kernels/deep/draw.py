"""Random inputs: sizes, strides, alignment and values, a function of a seed, with a note of what was drawn."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class Budget(NamedTuple):
    """How much is compared.

    Attributes:
        side: Largest size of an input.
        repeats: How often a configuration runs on one input.
        configs: How many configurations of a case run; None for all.
        bf16_subnormals: Whether bf16 inputs may be subnormal: Triton's interpreter widens those to other numbers.
    """

    side: int
    repeats: int
    configs: int | None = None
    bf16_subnormals: bool = True


GPU = Budget(side=1500, repeats=2)
INTERPRETER = Budget(side=40, repeats=1, configs=1, bf16_subnormals=False)
"""It takes a second for what a GPU does in microseconds, and knows of a configuration no more than its tile."""


@dataclass
class Draw:
    """One source of random sizes, values and strides, and a note of what it gave."""

    seed: str
    budget: Budget
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.choice = random.Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.choice.getrandbits(63))

    def side(self) -> int:
        """A size from 1 on, as often small as large, every other time a multiple of 16."""
        side = int(self.budget.side ** self.choice.random())
        return -(-side // 16) * 16 if self.choice.random() < 0.5 else side

    def normal(self, *shape: int) -> Tensor:
        """Float32, standard normal."""
        return torch.randn(shape, generator=self.generator)

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        """Int64 from low to high, both included."""
        return torch.randint(low, high + 1, shape, generator=self.generator)

    def positive(self, *shape: int) -> Tensor:
        """Float32, log-normal."""
        return torch.exp(2 * self.normal(*shape))

    def matrix(self, rows: int | None = None, columns: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """A matrix of some size, dtype, memory layout and kind of values."""
        rows, columns = rows or self.side(), columns or self.side()
        dtype = dtype or self.choice.choice((torch.bfloat16, torch.bfloat16, torch.float32, torch.float16))
        layout = self.choice.choice(("contiguous", "contiguous", "transposed", "every other column", "not aligned"))
        kind = self.choice.choice(tuple(_VALUES))
        if kind == "subnormal" and dtype == torch.bfloat16 and not self.budget.bf16_subnormals:
            kind = "normal"
        self.notes.append(f"{str(dtype).removeprefix('torch.')} [{rows},{columns}] {layout} {kind}")
        if layout == "transposed":
            return self._values(kind, columns, rows, dtype).t()
        if layout == "every other column":
            return self._values(kind, rows, 2 * columns, dtype)[:, ::2]
        if layout == "not aligned":
            return self._values(kind, rows + 1, columns + 3, dtype)[1:, 3:]
        return self._values(kind, rows, columns, dtype)

    def _values(self, kind: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        values = _VALUES[kind](self, rows, columns)
        if kind == "subnormal":
            values *= torch.finfo(dtype).smallest_normal / 10
        if kind == "huge":
            values = (values * (torch.finfo(dtype).max / 4)).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
        if kind == "not finite":
            for special in (torch.nan, -torch.nan, torch.inf, -torch.inf):
                values[self.choice.randrange(rows), self.choice.randrange(columns)] = special
        return values.to(dtype)


_VALUES: dict[str, Callable[[Draw, int, int], Tensor]] = {
    "normal": lambda draw, r, c: draw.normal(r, c),
    "log-normal": lambda draw, r, c: draw.normal(r, c) * draw.positive(r, c),
    "outlier rows and columns": lambda draw, r, c: draw.normal(r, c) * draw.positive(r, 1) * draw.positive(1, c),
    "zeros": lambda draw, r, c: draw.normal(r, c) * (draw.normal(r, 1) > 0) * (draw.normal(1, c) > 0),
    "subnormal": lambda draw, r, c: draw.normal(r, c),
    "huge": lambda draw, r, c: draw.normal(r, c),
    "not finite": lambda draw, r, c: draw.normal(r, c),
}
