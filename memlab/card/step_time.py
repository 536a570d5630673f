"""How long a step takes on a card: its work, the card's rates, and what kernels reach of them.

A kernel takes the longest of its operations by the card's rate, its bytes by the card's bandwidth,
and the least time that any kernel takes. Kernels queue: the host puts them into the card's queue
one operator at a time, and the card waits only where that takes longer than the kernels do. So a
phase of the step (forward, backward, optimizer step) takes the longer of what its kernels take and
what its operators take on the host.

What is left out: the host's own work between steps, reading and copying batches, memory that moves
between host and card, communication, and whatever slows a card down that is hot or shared.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from memlab.footprint import Phase, StepTime
from memlab.gpus import GPU


@dataclass(frozen=True)
class Reach:
    """What programs reach of a card's data sheet, the same for all cards and recipes.

    products: share of the rate of ordinary cores in a matrix product; tensor_products: of tensor
    cores. bandwidth: share of the memory's bandwidth. kernel: seconds that the shortest kernel
    takes; operator: seconds of the host for one operator in PyTorch's eager mode.
    """

    products: float
    tensor_products: float
    bandwidth: float
    kernel: float
    operator: float


# Chosen before these rules met a measured step, from the sources below. A prototype with shares of
# 0.85, 0.5, 0.8 and 10 us a kernel had been set beside the nine published runs on a V100 before.
# The rule of rounds (`busy`) was added after a first look at these nine, which had trainings of one
# sequence in fp16 up to 63 % too fast; no share was changed.
# - bandwidth 0.8: 750 of 900 GB/s on a V100 (Jia et al. 2018, "Dissecting the NVIDIA Volta GPU
#   architecture via microbenchmarking"); 0.75 to 0.9 above 10 MB on an A100 (Calculon's
#   systems/a100_80g.json, Isaev et al. 2023)
# - products 0.85: large single-precision products on ordinary cores
# - tensor_products 0.5: at best 0.66 on a V100 (Markidis et al. 2018, 83 of 125 TFLOPS), 0.87 on an
#   A100 and 0.8 on an H100 (Bekman, "ml-engineering", maximum achievable matmul); whole trainings
#   reach 0.44 to 0.52 of an A100 (Narayanan et al. 2021)
# - kernel 3 us, one kernel after the other in a queue takes 2.9 to 3.8 us on a V100 (Gray 2019,
#   "Getting started with CUDA graphs")
# - operator 10 us: 5 to 25 us a call in eager mode
EXPECTED = Reach(0.85, 0.5, 0.8, 3e-6, 10e-6)
# Nobody's mean: what a good and a bad program, card and day make of it.
BEST = Reach(0.95, 0.75, 0.92, 2e-6, 5e-6)
WORST = Reach(0.7, 0.35, 0.65, 5e-6, 20e-6)


def step_time(work: Counter, gpu: GPU, samples: int | None = None) -> StepTime:
    """The estimated seconds of a step's work on a card. samples: sequences in the step.

    Raises ValueError for a card without rates, and for a number format that it has no rate for.
    """
    _require_rates(work, gpu)
    parts = _seconds(work, gpu, EXPECTED)
    rates = [gpu.rate(one.dtype) for one in work if one.flops and not one.recomputed]
    flops = sum(one.flops * n for one, n in work.items() if not one.recomputed)
    return StepTime(
        low=sum(_seconds(work, gpu, BEST).values()),
        expected=sum(parts.values()),
        high=sum(_seconds(work, gpu, WORST).values()),
        parts=parts,
        flops=flops,
        peak_rate=max(rates, default=0.0),
        samples=samples,
    )


def _require_rates(work, gpu) -> None:
    if gpu.bandwidth is None:
        raise ValueError(f"{gpu.name} has no rates, and so no seconds: name a card, such as T4")
    for dtype in {one.dtype for one in work if one.flops}:
        if gpu.rate(dtype) is None:
            allowed = ", ".join(gpu.rates)
            raise ValueError(f"{gpu.name} has no rate for {dtype}: it has those of {allowed}")


def _seconds(work, gpu, reach) -> dict[str, float]:
    """Seconds by part; they sum to the step's."""
    parts = dict.fromkeys(StepTime.PARTS, 0.0)
    kernels, host = Counter(), Counter()
    for one, times in work.items():
        by_flops = one.flops and one.flops / (
            gpu.rate(one.dtype) * reached(one.dtype, reach) * busy(one.tiles, gpu.processors)
        )
        by_bytes = one.nbytes / (gpu.bandwidth * reach.bandwidth)
        longest = max(by_flops, by_bytes, one.kernels * reach.kernel) * times
        kernels[one.phase] += longest
        host[one.phase] += one.kernels * reach.operator * times
        if one.phase == Phase.STEP:
            part = "optimizer"
        elif one.recomputed:
            part = "recomputation"
        else:
            part = "matrix products" if by_flops > by_bytes else "memory traffic"
        parts[part] += longest
    for phase, seconds in kernels.items():
        parts["waiting for launches"] += max(0.0, host[phase] - seconds)
    return parts


def busy(tiles: int, processors: int) -> float:
    """The share of a card's processors that a product keeps at work, from 0 to 1.

    A product's result is computed tile by tile, one a processor at a time, and the last round of
    tiles is seldom full: "wave quantization" in NVIDIA's "Matrix multiplication background user's
    guide". cuBLAS has other tiles, too, which fill the rounds better and are less efficient each;
    here all are of one size (`memlab.card.work`).
    """
    return tiles / (-(-tiles // processors) * processors) if tiles else 1.0


def reached(dtype: str, reach: Reach) -> float:
    """The share of a card's rate that products of this format reach."""
    return reach.products if dtype in ("float32", "float64") else reach.tensor_products
