"""How long a step takes on a card: its work, the card's rates, and what kernels reach of them.

A kernel takes the longest of its operations by the card's rate, its bytes by the card's bandwidth,
and the least time that any kernel takes. Kernels queue: the host puts them into the card's queue
one operator at a time, and the card waits only where that takes longer than the kernels do. So a
phase of the step (forward, backward, optimizer step) takes the longer of what its kernels take and
what its operators take on the host.

Copies between card and host stand in the queue of the kernels, and take their bytes by the rate of
PCI Express.

What is left out: the host's own work between steps, reading and copying batches, pages that the
driver moves between host and card, and whatever slows a card down that is hot or shared. What ranks
send each other takes its bytes by the link's rate, and counts where no kernels run beside it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from memlab.card.links import link_rate
from memlab.card.op_cost import count_kernels, count_tiles
from memlab.footprint import Phase, StepTime
from memlab.gpus import GPU

PHASES = list(Phase)


@dataclass(frozen=True)
class Efficiency:
    """What programs reach of a card's data sheet, the same for all cards and recipes.

    products: share of the rate of ordinary cores in a matrix product; tensor_products: of tensor
    cores. bandwidth: share of the memory's bandwidth. kernel: seconds that the shortest kernel
    takes; operator: seconds of the host for one operator in PyTorch's eager mode. hidden: share of
    the collectives of a forward or backward pass that runs beside its kernels, while these last.
    """

    products: float
    tensor_products: float
    bandwidth: float
    kernel: float
    operator: float
    hidden: float


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
# - hidden 1: FSDP and DDP start a collective while the layer before or after computes (PyTorch's
#   documentation of fully_shard, "prefetching"; Li et al. 2020, "PyTorch distributed"). That a
#   link reaches the share of its rate that a memory does was compared with no measurement yet.
EXPECTED = Efficiency(0.85, 0.5, 0.8, 3e-6, 10e-6, 1)
# Nobody's mean: what a good and a bad program, card and day make of it.
BEST = Efficiency(0.95, 0.75, 0.92, 2e-6, 5e-6, 1)
WORST = Efficiency(0.7, 0.35, 0.65, 5e-6, 20e-6, 0)


class Columns(NamedTuple):
    """The work of a step as arrays of equal length, an operator an element.

    dtypes: number formats; of: the place in `dtypes` of each operator's, -1 without products.
    phase: the place in `PHASES`. times: how often it runs. The rest is as in `Work`; sent and
    carried may be 0 for all.
    """

    dtypes: list[str]
    of: np.ndarray
    flops: np.ndarray
    tiles: np.ndarray
    nbytes: np.ndarray
    kernels: np.ndarray
    phase: np.ndarray
    recomputed: np.ndarray
    times: np.ndarray
    sent: np.ndarray | float = 0.0
    carried: np.ndarray | float = 0.0

    @classmethod
    def from_counter(cls, work: Counter) -> Columns:
        """Of `Work` -> how often."""
        dtypes = sorted({one.dtype for one in work if one.dtype})
        place = {dtype: i for i, dtype in enumerate(dtypes)} | {"": -1}
        rows = [
            (place[one.dtype], one.flops, one.nbytes, one.lists, one.elements,
             PHASES.index(one.phase), one.recomputed, times, one.sent, one.carried,
             *(one.result or (0, 0, 0)))
            for one, times in work.items()
        ]  # fmt: skip
        table = np.array(rows, float).reshape(-1, 13).T
        of, flops, nbytes, lists, elements, phase, again, times, *between = table[:10]
        of, phase, lists = of.astype(int), phase.astype(int), lists.astype(int)
        tiles = count_tiles(table[10:].T, [one.dtype for one in work])
        kernels = count_kernels(lists, elements)
        return cls(dtypes, of, flops, tiles, nbytes, kernels, phase, again > 0, times, *between)


def step_time(
    work: Counter | Columns, gpu: GPU, samples: int | None = None, link: str | None = None
) -> StepTime:
    """The estimated seconds of a step's work on a card.

    samples: sequences in the step. link: between ranks, as in `memlab.card.links.link_rate`.

    Raises ValueError for a card without rates, for a number format that it has no rate for, and for
    a link that it does not have.
    """
    columns = work if isinstance(work, Columns) else Columns.from_counter(work)
    rates = _rates(columns, gpu)
    sent = float(np.sum(columns.sent * columns.times))
    over = link_rate(gpu, link) if sent or link else np.inf
    to_host = link_rate(gpu, "pcie") if np.any(columns.carried) else np.inf
    parts = _seconds(columns, rates, gpu, EXPECTED, over, to_host)
    useful = ~columns.recomputed & (columns.of >= 0)
    return StepTime(
        low=sum(_seconds(columns, rates, gpu, BEST, over, to_host).values()),
        expected=sum(parts.values()),
        high=sum(_seconds(columns, rates, gpu, WORST, over, to_host).values()),
        parts=parts,
        flops=round(float(columns.flops[useful] @ columns.times[useful])),
        peak_rate=max((rates[i] for i in set(columns.of[useful])), default=0.0),
        samples=samples,
        sent=round(sent),
    )


def _rates(columns, gpu) -> list[float]:
    """The card's rate for each of the formats."""
    if gpu.bandwidth is None:
        raise ValueError(f"{gpu.name} has no rates, and so no seconds: name a card, such as T4")
    for dtype in columns.dtypes:
        if gpu.rate(dtype) is None:
            allowed = ", ".join(gpu.rates)
            raise ValueError(f"{gpu.name} has no rate for {dtype}: it has those of {allowed}")
    return [gpu.rate(dtype) for dtype in columns.dtypes]


def _seconds(columns, rates, gpu, reach, over, to_host) -> dict[str, float]:
    """Seconds by part; they sum to the step's."""
    usual = [rate * reached(d, reach) for d, rate in zip(columns.dtypes, rates, strict=True)]
    rate = np.array([*usual, 1.0])[columns.of]  # the last is for what has no products
    by_flops = columns.flops / (rate * busy(columns.tiles, gpu.processors))
    by_bytes = columns.nbytes / (gpu.bandwidth * reach.bandwidth)
    each = np.maximum(np.maximum(by_flops, by_bytes), columns.kernels * reach.kernel)
    longest = each * columns.times
    host = columns.kernels * columns.times * reach.operator
    step = columns.phase == PHASES.index(Phase.STEP)
    again = columns.recomputed & ~step
    products = (by_flops > by_bytes) & ~step & ~again
    places = {
        "matrix products": products,
        "memory traffic": ~products & ~step & ~again,
        "recomputation": again,
        "optimizer": step,
    }
    parts = {name: float(longest[which].sum()) for name, which in places.items()}
    by_phase = (np.bincount(columns.phase, one, len(PHASES)) for one in (host, longest))
    on_host, on_card = by_phase
    parts["waiting for launches"] = float(np.maximum(0, on_host - on_card).sum())
    seconds = columns.sent * columns.times / (over * reach.bandwidth)
    sending = np.bincount(columns.phase, np.broadcast_to(seconds, columns.phase.shape), len(PHASES))
    hidden = reach.hidden * np.minimum(sending, np.maximum(on_host, on_card))
    hidden[PHASES.index(Phase.STEP)] = 0  # the updated weights are sent when all is done
    parts["communication"] = float((sending - hidden).sum())
    copies = columns.carried * columns.times / (to_host * reach.bandwidth)
    parts["copies to the host and back"] = float(np.sum(copies))
    return parts


def busy(tiles: np.ndarray, processors: int) -> np.ndarray:
    """The share of a card's processors that a product keeps at work, from 0 to 1.

    A product's result is computed tile by tile, one a processor at a time, and the last round of
    tiles is seldom full: "wave quantization" in NVIDIA's "Matrix multiplication background user's
    guide". cuBLAS has other tiles, too, which fill the rounds better and are less efficient each;
    here all are of one size (`memlab.card.op_cost`).
    """
    rounds = np.ceil(tiles / processors)
    return np.where(tiles > 0, tiles / np.maximum(rounds * processors, 1), 1.0)


def reached(dtype: str, reach: Efficiency) -> float:
    """The share of a card's rate that products of this format reach."""
    return reach.products if dtype in ("float32", "float64") else reach.tensor_products
