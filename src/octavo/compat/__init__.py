"""Level 7: entry points with the names of other libraries, for code that moves to Octavo."""

from octavo.compat import torchao

__all__ = ["torchao"]
