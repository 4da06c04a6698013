import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

from run_fixtures import *  # noqa: F403
