"""A session of a benchmark on the CPU."""

import argparse

import torch
from benchmarks.session import Session
from benchmarks.timing import CpuClock

CPU = torch.device("cpu")


def session_of(name, tmp_path, clock=None, **options):
    options = argparse.Namespace(**{"arguments": [], "quick": False} | options)
    return Session(name, CPU, clock or CpuClock(), options, paths=[tmp_path / f"{name}.json"])
