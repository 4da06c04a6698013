"""The learning rate as a pure function of the step: nothing to save, nothing to resume.

With S steps, W of warmup, peak 1 and end e, at step t = 0 … S - 1:

    warmup     (t + 1) / W                                            t < W
    cosine     e + (1 - e) · (1 + cos(π (t - W) / (S - W))) / 2
    wsd        1 until the last D = decay · S steps, then linearly to e
    constant   1
"""

import math

from octavo.train.config.sections import Optim, decay_steps


def learning_rate(optim: Optim, step: int, steps: int) -> float:
    """Learning rate of step 0, 1, … of `steps`."""
    return optim.lr * _factor(optim, step, steps)


def _factor(optim: Optim, step: int, steps: int) -> float:
    if step < optim.warmup:
        return (step + 1) / optim.warmup
    end = optim.min_lr_ratio
    if optim.schedule == "cosine":
        done = (step - optim.warmup) / max(1, steps - optim.warmup)
        return end + (1 - end) * (1 + math.cos(math.pi * done)) / 2
    if optim.schedule == "wsd":
        decay = decay_steps(optim, steps)
        return end + (1 - end) * min(1.0, (steps - step) / decay) if decay else 1.0
    return 1.0
