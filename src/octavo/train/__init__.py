"""Level 6: the trainer behind `octavo train` and `octavo demo`.

From Python:

    config = load_config("configs/demo.toml", ["run.steps=50"])
    result = run(config, out=Path("runs/demo"))

`run` is the whole flow; `loop.py` tells it, and the other files are its parts: what a run is (config, outputs), what it
reads (source, tokenizer, data), what it trains (model, checkpointing), how (optimizer, schedule, loss_scale), what it
leaves (metrics, checkpoint), and where it went wrong (diagnose).
"""

from octavo.runtime.extras import needs_extras

with needs_extras("octavo.train"):
    from octavo.train.config import ConfigError, TrainConfig, load_config, parse_config
    from octavo.train.diagnose import NonFiniteError
    from octavo.train.loop import run
    from octavo.train.metrics import Losses, Progress, RunResult, StepMetrics, read_metrics
    from octavo.train.ranks import LostRankError

__all__ = [
    "ConfigError",
    "Losses",
    "LostRankError",
    "NonFiniteError",
    "Progress",
    "RunResult",
    "StepMetrics",
    "TrainConfig",
    "load_config",
    "parse_config",
    "read_metrics",
    "run",
]
