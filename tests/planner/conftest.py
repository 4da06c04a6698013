import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "nn"))

from processes import gloo  # noqa: F401  a fixture
