"""Bands: the rows of a matrix a few at a time, so that what is made of them on the way stays in a core's cache.

PyTorch takes one operation after the other over whole tensors. On a CPU each intermediate result of a large matrix then
goes through memory, and the pages of a fresh one are cleared first, which takes longer than the arithmetic.
"""

ELEMENTS = 262144
"""Elements of a band: a megabyte in float32."""


def bands(shape: tuple[int, int], multiple: int = 1) -> list[slice]:
    """Slices over the rows of a matrix [R,C], in order, each of a multiple of `multiple` rows but the last.

    Empty for an empty matrix.
    """
    rows, columns = shape
    step = max(ELEMENTS // max(columns * multiple, 1), 1) * multiple
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)] if columns else []
