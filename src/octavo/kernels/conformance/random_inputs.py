"""Random inputs as a function of a seed: sizes, strides, alignment and values, with notes."""

import random
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class Budget(NamedTuple):
    size: int  # Largest size of an input
    repeats: int  # Runs of a configuration on one input
    configs: int | None = None  # Configurations per case; None for all
    bf16_subnormals: bool = True  # Whether bf16 inputs may be subnormal; Triton's interpreter converts those wrongly


GPU = Budget(size=1500, repeats=2)
INTERPRETER = Budget(size=40, repeats=1, configs=1, bf16_subnormals=False)
"""Triton's interpreter takes a second where a GPU takes microseconds, and configurations differ only in their tile."""

KINDS = ("normal", "log-normal", "outlier rows and columns", "zeros", "subnormal", "huge", "not finite")  # Of values


@dataclass
class RandomInputs:
    """Generator of random sizes, values and strides; `notes` describes the results."""

    seed: str
    budget: Budget
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(63))

    def size(self) -> int:
        """Return a size of 1 or more, log-uniform; every other one is a multiple of 16."""
        size = int(self.budget.size ** self.random.random())
        return -(-size // 16) * 16 if self.random.random() < 0.5 else size

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device="cpu")

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=self.generator, device="cpu")

    def positive(self, *shape: int) -> Tensor:
        return torch.exp(2 * self.normal(*shape))

    def matrix(self, rows: int | None = None, columns: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a matrix of random size, dtype, memory layout and kind of values."""
        rows, columns = rows or self.size(), columns or self.size()
        dtype = dtype or self.random.choice((torch.bfloat16, torch.bfloat16, torch.float32, torch.float16))
        layout = self.random.choice(("contiguous", "contiguous", "transposed", "every other column", "not aligned"))
        kind = self.random.choice(KINDS)
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
        values = self.normal(rows, columns)
        if kind == "log-normal":
            values *= self.positive(rows, columns)
        if kind == "outlier rows and columns":
            values.mul_(self.positive(rows, 1)).mul_(self.positive(1, columns))
        if kind == "zeros":
            values.mul_(self.normal(rows, 1) > 0).mul_(self.normal(1, columns) > 0)
        if kind == "subnormal":
            values *= torch.finfo(dtype).smallest_normal / 10
        if kind == "huge":
            values = (values * (torch.finfo(dtype).max / 4)).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
        if kind == "not finite":
            for special in (torch.nan, -torch.nan, torch.inf, -torch.inf):
                values[self.random.randrange(rows), self.random.randrange(columns)] = special
        return values.to(dtype)
