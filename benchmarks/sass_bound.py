"""What bounds a kernel, from its machine code alone: occupancy, clocks per element of each unit, the time it takes.

    memory    bytes per element through device memory, at the bandwidth that a copy reaches
    latency   bytes of loads under way per SM (outstanding per thread × resident threads), renewed once per latency
    issue     4 instructions per clock and SM, one for each of its quarters
    alu, mul, fp32, slow     warp instructions per clock and SM: 2, 2, 4 (mul included), 0.5
    l1        128 bytes per clock and SM of loads, stores, shared memory and shuffles
    matrix    FLOP per clock and SM of the matrix units
    l2        bytes that each SM loads from L2, for products: each output tile reads its rows of A and of B

Throughputs per SM are those of the CUDA programming guide's table of arithmetic instructions. They are upper limits of
speed: latencies of dependent instructions, bank conflicts and barriers are not modelled, so a kernel can be slower than
its bound and not faster.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks import roofline
from benchmarks.sass_code import Code, Instruction
from octavo.planner.devices import Gpu


@dataclass(frozen=True)
class Architecture:
    """Limits of one SM, by compute capability."""

    warps: int
    blocks: int
    shared: int
    registers: int = 65536

    def occupancy(self, registers: int, shared: int, num_warps: int) -> tuple[int, float]:
        """Programs resident on an SM, and the share of its warps that they fill."""
        per_warp = -(-registers * 32 // 256) * 256
        by_registers = self.registers // 4 // per_warp * 4 // num_warps  # warps live in one of four quarters
        by_shared = self.shared // (-(-shared // 128) * 128 + 1024)  # the system keeps 1 KiB for each program
        programs = min(self.blocks, self.warps // num_warps, by_registers, by_shared)
        return programs, programs * num_warps / self.warps


ARCHITECTURES = {
    89: Architecture(warps=48, blocks=24, shared=100 << 10),
    90: Architecture(warps=64, blocks=32, shared=228 << 10),
    100: Architecture(warps=64, blocks=32, shared=228 << 10),
    120: Architecture(warps=48, blocks=24, shared=100 << 10),
}


DEVICES = (roofline.DEVICES["H100"], roofline.DEVICES["H200"])
"""What times are predicted for; both are sm_90."""

CLOCK = 1.755e9
"""Hz that both sustain where the matrix units rest."""

LATENCY = 700e-9
"""Seconds until a load from device memory arrives while memory is busy: an assumption."""

RATES = {"alu": 2.0, "mul": 2.0, "fp32": 4.0, "slow": 0.5, "issue": 4.0, "l1": 128.0}
"""Per clock and SM: warp instructions, and bytes for l1."""

L2_BYTES = 32
"""Bytes from L2 per clock and SM while all SMs load: half of what the port takes, an assumption (7.4 TB/s, H100)."""


def usage(code: Iterable[Instruction]) -> Counter[str]:
    """What one warp asks of each unit: instructions, bytes of memory instructions, FLOP of matrix instructions."""
    total: Counter[str] = Counter()
    for i in code:
        total["issue"] += 1
        total["matrix"] += int(i.flops)
        if i.pipe == "memory":
            total["l1"] += max(32 * i.bytes, 128)
        elif i.pipe == "mul":
            total.update(("mul", "fp32"))
        elif i.pipe != "none":
            total[i.pipe] += 1
    return total


@dataclass(frozen=True)
class Cost:
    """What one element of the input costs an SM: instructions, clocks of each unit of `RATES`, bytes, FLOP.

    `loaded` are bytes of global memory, served by it or a cache; `wide` those that are asked for 16 bytes at a time.
    """

    instructions: float
    clocks: dict[str, float]
    loaded: float
    stored: float
    wide: float
    flops: float


def cost_of(code: Code, num_warps: int, tile: int, trips: int) -> Cost:
    """Cost per element: loop bodies once per tile; what is outside, once per `trips` tiles where there are loops."""
    if code.contraction:
        step = {i.address for i in code.contraction}
        rest = tuple(i for i in code.hot if i.address not in step)
        parts = [(code.contraction, 1.0), (rest, 1 / trips)]
    else:
        parts = [(code.straight, 1 / (trips if code.loops else 1)), *((body, 1.0) for body in code.loops)]
    total: Counter[str] = Counter()
    weighted: dict[str, float] = {}
    for body, weight in parts:
        total = usage(body)
        for i in body:
            if i.op in ("LDG", "STG", "LDGSTS"):
                total["stored" if i.op == "STG" else "loaded"] += 32 * i.bytes
                total["wide"] += 32 * i.bytes * (i.bytes == 16)
        for unit, amount in total.items():
            weighted[unit] = weighted.get(unit, 0.0) + weight * amount * num_warps / tile
    return Cost(
        instructions=32 * weighted["issue"],
        clocks={unit: weighted.get(unit, 0.0) / rate for unit, rate in RATES.items()},
        loaded=weighted.get("loaded", 0.0),
        stored=weighted.get("stored", 0.0),
        wide=weighted.get("wide", 0.0),
        flops=weighted.get("matrix", 0.0),
    )


def seconds_per_element(cost: Cost, device_bytes: float, in_flight: float, device: Gpu) -> dict[str, float]:
    """Time per element that each limit allows, all SMs busy. `in_flight`: bytes of loads under way per SM."""
    per_second = device.multiprocessors * CLOCK
    times = {"memory": device_bytes / device.bandwidth}
    if in_flight:
        times["latency"] = min(cost.loaded, device_bytes) * LATENCY / (device.multiprocessors * in_flight)
    times |= {unit: clocks / per_second for unit, clocks in cost.clocks.items()}
    if cost.flops:
        times["matrix"] = cost.flops / (device.fp8_tflops * 1e12 * device.fp8_efficiency)
    return times


def product_seconds(m: int, n: int, k: int, tile: tuple[int, int], programs: int, device: Gpu) -> float:
    """Time of an FP8 product: the longest of whole waves of output tiles at the matrix rate, its bytes, and L2's."""
    tiles = math.ceil(m / tile[0]) * math.ceil(n / tile[1])
    waves = math.ceil(tiles / device.multiprocessors / programs) * programs
    matrix = (
        waves * 2 * tile[0] * tile[1] * k * device.multiprocessors / (device.fp8_tflops * 1e12 * device.fp8_efficiency)
    )
    l2 = waves * (tile[0] + tile[1]) * k / (CLOCK * L2_BYTES)
    return max(matrix, l2, roofline.moving(device, m * k + n * k + 2 * m * n))
