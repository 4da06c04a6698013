"""The long run: how growth of memory is judged, and that the recorded runs hold."""

import json

import pytest
from benchmarks import long_run
from benchmarks.long_run import GROWTH_KIB, OBSERVED, SETTLED, grows, growth

COMMITTED = json.loads(long_run.FILE.read_text())


def process(first=0, steps=600, leak_kib=0.0, warmup=40.0):
    """Samples of every fifth step of a process: it fills up over `warmup` steps, then leaks."""
    return [(first + n, 700 + 30 * min(n / warmup, 1) + leak_kib * n / 1024) for n in range(1, steps + 1, 5)]


def test_growth_after_the_first_steps_alone():
    assert growth(process()) == {"steps": 495, "kib_per_step": 0.0, "mib": 0.0}
    assert growth(process(leak_kib=3.0))["kib_per_step"] == pytest.approx(3.0)
    assert growth(process(first=880, leak_kib=3.0))["kib_per_step"] == pytest.approx(3.0)  # restarted from step 880
    assert growth(process(warmup=200.0))["kib_per_step"] > GROWTH_KIB  # a warm-up that is longer than that counts
    assert growth(process(steps=SETTLED + OBSERVED - 10)) is None and growth(process(steps=3)) is None


def test_a_jump_and_noise():
    steady = [(step, size + (step % 2) * 0.05) for step, size in process()]
    assert abs(growth(steady)["kib_per_step"]) < 0.5
    assert growth([(step, size + 8 * (step > 300)) for step, size in process()])["kib_per_step"] > GROWTH_KIB


def test_the_processes_that_grow():
    a_key_in_fp8 = 64.0
    assert grows([process(), process(steps=250), process(leak_kib=a_key_in_fp8), process(leak_kib=5.0)]) == [2, 3]


def test_the_recorded_runs():
    memory = COMMITTED["memory"]
    for arm, processes in memory.items():
        assert [each["growth"] for each in processes] == [growth(each["mib"]) for each in processes], arm
        assert grows([each["mib"] for each in processes]) == COMMITTED["grew"][arm] == []
    assert memory["plain"][0]["growth"]["steps"] >= OBSERVED
    assert COMMITTED["differing_steps"] == [] and COMMITTED["exit_codes"] == [0, 0] and len(COMMITTED["kills"]) >= 10
