"""Losses of simulated runs, healthy and with a spike, for the guard."""

import math
import random

import fake_runs

from octavo.train.config.sections import GuardConfig
from octavo.train.guard import SpikeError, SpikeGuard

RUN = 5000  # Steps of a run; each begins anew

# Each kind draws factors of the loss and of the gradient norm of a step.


def plain(rng, step):
    return 1 + 0.02 * rng.gauss(0, 1), math.exp(0.1 * rng.gauss(0, 1))


def scaled(factor):
    def drawn(rng, step):
        loss, norm = plain(rng, step)
        level = factor(rng, step)
        return loss * level, norm * level

    return drawn


def student(degrees):
    def t(rng):
        return rng.gauss(0, 1) / math.sqrt(sum(rng.gauss(0, 1) ** 2 for _ in range(degrees)) / degrees)

    return lambda rng, step: (max(1 + 0.02 * t(rng), 0.1), math.exp(min(0.3 * t(rng), 50.0)))


def hump(rng, step):
    """A warm-up that is too fast for a while: the loss rises by 20 %, the gradient norm to its double."""
    loss, norm = plain(rng, step)
    height = math.exp(-(((step - 400) / 60) ** 2))
    return loss * (1 + 0.2 * height), norm * (1 + height)


HEALTHY = {
    "5 % of batches 30 % harder": scaled(lambda rng, step: 1 + 0.3 * (rng.random() < 0.05)),
    "20 % of batches 100 % harder": scaled(lambda rng, step: 1 + (rng.random() < 0.2)),
    "1 % of batches 10 times harder": scaled(lambda rng, step: 1 + 9 * (rng.random() < 0.01)),
    "curriculum, ±60 % every 500 steps": scaled(lambda rng, step: 1 + 0.6 * (step // 500 % 2)),
    "shards of 40 steps, 1 in 10 of 30 % more": scaled(
        lambda rng, step: 1 + 0.3 * (random.Random(step // 40).random() < 0.1)
    ),
    "hump of the learning rate, +20 %": hump, "Student's t, 3 degrees of freedom": student(3),
    "Cauchy noise": student(1),
    "Pareto noise, α = 1.5": lambda rng, step: (0.95 + 0.05 * rng.paretovariate(1.5), rng.paretovariate(1.5)),
    "tiny batches, log-normal noise of 30 %": lambda rng, step: (
        math.exp(0.3 * rng.gauss(0, 1)),
        math.exp(0.8 * rng.gauss(0, 1)),
    ),
}  # fmt: skip
SPIKES = ((1.4, 10.0), (1.5, 5.0), (2.5, 1.0), (3.0, 0.1))  # Factors of loss and gradient norm from one step on


def steps(kind, seed, count=RUN, factors=(1.0, 1.0), since=RUN):
    """The steps of a run, with loss and norm times `factors` after the step `since`."""
    rng = random.Random(seed)
    for step in range(count):
        loss, norm = (a * b for a, b in zip(kind(rng, step), factors if step >= since else (1.0, 1.0), strict=True))
        norm *= 0.5 + math.exp(-step / 100)
        yield fake_runs.step(step + 1, (2 + 4 * math.exp(-step / 300)) * loss, grad_norm=norm)


def alarms(taken):
    """The spikes that a guard sees, first step and step in which each is recognized; after one a new guard goes on."""
    spikes, guard = [], SpikeGuard(GuardConfig(spike=8.0))
    for step in taken:
        try:
            guard.check(step)
        except SpikeError as error:
            spikes.append((error.first, error.step))
            guard = SpikeGuard(GuardConfig(spike=8.0))
    return spikes
