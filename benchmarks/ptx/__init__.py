"""Interpret the PTX that Triton compiles for Hopper, on a CPU: the machine code's bytes, races and traffic.

Triton's own interpreter runs the Python of a kernel, so it shows nothing that the compiler does: layouts, vector
widths, shared memory, barriers. Here the compiled kernel itself runs, down to the text that `ptxas` gets.

    program.py      parses PTX
    arithmetic.py   instructions that compute, on numpy vectors of threads
    memory.py       device and shared memory: bounds, alignment, races, sectors, bank conflicts
    machine.py      runs CTAs
    products.py     runs CTAs whose warps part: TMA, mbarriers, wgmma
    launches.py     compiles and runs the launches of Octavo's kernels
    cases.py        all kernels against the reference, with and without planted faults
    command.py      `python -m benchmarks ptx`

Not covered: grouped products, the schedule of `ptxas`, races in device memory, timing.
"""

from benchmarks.ptx.command import main

__all__ = ["main"]
