"""Level 7: the trainer behind `octavo train`. `run` executes a training run; `loop.py` implements it."""

from typing import TYPE_CHECKING, Any

from octavo.runtime.extras import lazy_names, needs_extras

if TYPE_CHECKING:
    from octavo.train.config.run_config import ConfigError, TrainConfig, load_config, parse_config
    from octavo.train.diagnose import NonFiniteError
    from octavo.train.loop import run
    from octavo.train.ranks import LostRankError
    from octavo.train.record.metrics import Losses, RunResult, StepMetrics, read_metrics
    from octavo.train.record.progress import Progress

__all__ = [
    "ConfigError", "Losses", "LostRankError", "NonFiniteError", "Progress", "RunResult", "StepMetrics", "TrainConfig",
    "load_config", "parse_config", "read_metrics", "run",
]  # fmt: skip

_NAMES = {
    "train.config.run_config": ("ConfigError", "TrainConfig", "load_config", "parse_config"),
    "train.diagnose": ("NonFiniteError",), "train.loop": ("run",), "train.ranks": ("LostRankError",),
    "train.record.metrics": ("Losses", "RunResult", "StepMetrics", "read_metrics"),
    "train.record.progress": ("Progress",),
}  # fmt: skip

if not TYPE_CHECKING:  # a reader of records needs no trainer

    def __getattr__(name: str) -> Any:
        with needs_extras("octavo.train"):
            return lazy_names(__name__, _NAMES)(name)
