"""The learning rate as a pure function of the step: nothing to save, nothing to resume.

With S steps, W of warmup, peak 1 and end e, at step t = 0 … S - 1:

    warmup     (t + 1) / W                                            t < W
    cosine     e + (1 - e) · (1 + cos(π (t - W) / (S - W))) / 2
    linear     1 - (1 - e) · (t - W) / (S - W)
    wsd        1 until the last D = decay · S steps, then linearly to e
    constant   1

A second warmup of R steps from step F on (`rewarm`, `rewarm_from`) multiplies these by min(1, (t - F + 1) / R) for
t ≥ F: after a resume with other data, another batch or lost moments.
"""

import math

from octavo.train.config.sections import Optim, decay_steps


def learning_rate(optim: Optim, step: int, steps: int) -> float:
    """Learning rate of step 0, 1, … of `steps`."""
    return optim.lr * _factor(optim, step, steps) * _rewarm_factor(optim, step)


def average_decay(ema: float, step: int) -> float:
    """Decay of the moving average of the weights in step 0, 1, …: min(ema, (1 + t) / (10 + t))."""
    # The ramp lets the initial weights, which say nothing, fade in the first steps.
    return min(ema, (1 + step) / (10 + step))


def _rewarm_factor(optim: Optim, step: int) -> float:
    if optim.rewarm_from is None or step < optim.rewarm_from:
        return 1.0
    return min(1.0, (step - optim.rewarm_from + 1) / optim.rewarm)


def _factor(optim: Optim, step: int, steps: int) -> float:
    if step < optim.warmup:
        return (step + 1) / optim.warmup
    end = optim.min_lr_ratio
    if optim.schedule == "cosine":
        done = (step - optim.warmup) / max(1, steps - optim.warmup)
        return end + (1 - end) * (1 + math.cos(math.pi * done)) / 2
    if optim.schedule == "linear":
        return 1 - (1 - end) * (step - optim.warmup) / max(1, steps - optim.warmup)
    if optim.schedule == "wsd":
        decay = decay_steps(optim, steps)
        return end + (1 - end) * min(1.0, (steps - step) / decay) if decay else 1.0
    return 1.0
