"""Level 7: the trainer behind `octavo train`.

From Python:

    config = load_config("configs/demo.toml", ["run.steps=50"])
    result = run(config, out=Path("runs/demo"))

`run` is the whole flow; `loop.py` tells it, and the other files are its parts: the configuration (`config/`), text to
batches (`data/`), the model and one step (`model`, `trainer`, `optimizer`, `schedule`, `loss_scale`), the processes
(`ranks`, `share`, `heartbeat`), what is saved (`checkpoint/`) and written down (`record/`), and where a run went wrong
(`diagnose`, `guard`).
"""

from octavo.runtime.extras import needs_extras

with needs_extras("octavo.train"):
    from octavo.train.config.run_config import ConfigError, TrainConfig, load_config, parse_config
    from octavo.train.diagnose import NonFiniteError
    from octavo.train.loop import run
    from octavo.train.ranks import LostRankError
    from octavo.train.record.metrics import Losses, Progress, RunResult, StepMetrics, read_metrics

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
