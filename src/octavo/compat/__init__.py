"""Level 7: entry points with the names of other libraries, for code that moves to Octavo.

torchao.py   torchao.float8.convert_to_float8_training
"""

from octavo.compat import torchao

__all__ = ["torchao"]
