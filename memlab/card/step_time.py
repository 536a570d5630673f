"""How long a step takes on a card: its work, what products and kernels were found to reach of the
card's rates, and the host's time.

A kernel takes the longest of its operations by what large products reach on the card
(`memlab.gpus.GPU.reached`), its bytes by what kernels reach of the memory's bandwidth, and the
least time that any kernel takes; an update with 8-bit states, which are looked up, its elements by
the processors' clock. What an operator reads was mostly written by the one before:
where its tensors fit in half of the L2 cache they come from there. Kernels queue: the host puts
them into the card's queue one operator at a time, and the card waits only where that takes longer
than the kernels do. So a phase of the step (forward, backward, optimizer step) takes the longer of
what its kernels take and what its operators take on the host.

Copies between card and host stand in the queue of the kernels, and take their bytes by the rate of
PCI Express.

What is left out: the host's own work between steps, reading and copying batches, pages that the
driver moves between host and card, and whatever slows a card down that is hot or shared. What ranks
send each other takes its bytes by the link's rate, and counts where no kernels run beside it: all
of a collective that the next kernels wait for, as tensor parallelism's, and of another what lasts
longer than the kernels of its phase.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from memlab.card.links import host_rate, link_rate
from memlab.footprint import Phase, StepTime
from memlab.gpus import GPU
from memlab.trace.work import Work, count_coded, count_kernels, count_tiles

PHASES = list(Phase)


@dataclass(frozen=True)
class Efficiency:
    """What programs reach of what was measured on a card, for all recipes and nearly all cards.

    products: share of what large products reach, once `busy` is counted. attention: the same of
    fused attention, and of what else has no tiles; on_hopper: attention on a card of compute
    capability 9.0.
    memory: kernels' bytes per second, times what they reach on the card (`GPU.traffic`).
    cache: how many times the memory's rate the L2 cache's is.
    coded: clocks of a processor for an element of a weight with states in 8 bits.
    kernel: seconds that the shortest kernel takes.
    forward, backward, update, inference: the host's seconds for an operator of a training's forward
    pass and of its recomputation, of the backward pass, of the optimizer step, and of a pass
    without gradients.
    link: share of a link's rate. hidden: share of the collectives of a forward or backward pass
    that runs beside its kernels, while these last; of those that kernels do not wait for.
    """

    products: float
    attention: float
    on_hopper: float
    memory: float
    cache: float
    coded: float
    kernel: float
    forward: float
    backward: float
    update: float
    inference: float
    link: float
    hidden: float

    def of_attention(self, gpu: GPU) -> float:
        """Share of what large products reach on the card."""
        return self.on_hopper if gpu.capability == (9, 0) else self.attention

    def host(self, phase: Phase) -> float:
        """Seconds of the host for an operator of a phase."""
        named = {Phase.FORWARD: self.forward, Phase.BACKWARD: self.backward}
        named |= dict.fromkeys((Phase.STEP, Phase.ZERO_GRAD), self.update)
        return named.get(phase, self.inference)


# Where the figures come from. Training runs were used for none of them but the cache's, the host's
# and those of 8-bit states.
# - products 0.92: 183 shapes of products of Llama's and DeepSeek's layers in bf16 on an A100 reach
#   0.72 of the data sheet in the median (SimuMax at 4dcaae5, configs/system/a100_pcie.json) where
#   large squares reach 0.77; in NeuSight's fp32 products above 3 GFLOP the median is 0.93 to 1 of
#   the largest, once rounds of tiles are counted
# - attention 0.6: FlashAttention-2 reaches 0.5 to 0.73 of an A100's data sheet forward and backward
#   (Dao 2023); on_hopper 0.44: it reaches 0.35 of an H100's, whose newer instructions it does not
#   use (Shah et al. 2024, "FlashAttention-3"), where large products reach 0.8
# - cache 2: assumed. An A100 reads 5,120 bytes a clock from its L2 cache, 4.6 times its memory's
#   rate (NVIDIA, "A100 Tensor Core GPU architecture"), but results go on to the memory. That there
#   is such a rule was seen on PEFT's runs on an L40S, whose steps came out a fifth too long
#   without it; 1.5 to 3 fit them about as well.
# - kernel 3 us, one kernel after the other in a queue takes 2.9 to 3.8 us on a V100 (Gray 2019,
#   "Getting started with CUDA graphs")
# - inference 20 us: a token of transformers' eager decoding takes 0.84 to 0.90 ms a layer of some
#   41 kernels at every size from 0.5B to 32B (Qwen's speed benchmarks). With gradients an operator
#   takes longer: forward 40, backward 20 and update 10 us come nearest to 31 runs of an H100 of a
#   cloud, forward 26 us to PEFT's on an L40S; 35 and 18 lie between
# - coded 8 clocks, and the host of 8 updates: what is left of the steps of four of those 31 runs,
#   which use bitsandbytes 0.50. Its kernel has a thread and a search in two tables an element, its
#   Python calls for each weight
# - link 0.8: NCCL's all-gather passes on 360 of 450 GB/s of an H100's NVLink (nccl-tests#326);
#   hidden 1: FSDP and DDP start a collective while the layer before or after computes (PyTorch's
#   documentation of fully_shard, "prefetching"; Li et al. 2020, "PyTorch distributed")
EXPECTED = Efficiency(0.92, 0.6, 0.44, 1, 2, 8, 3e-6, 35e-6, 18e-6, 10e-6, 20e-6, 0.8, 1)
# Nobody's mean: what a good and a bad program, card and day make of it.
BEST = Efficiency(1, 0.8, 0.8, 1.2, 3, 4, 2e-6, 20e-6, 10e-6, 5e-6, 10e-6, 0.92, 1)
WORST = Efficiency(0.7, 0.4, 0.3, 0.75, 1, 12, 5e-6, 60e-6, 30e-6, 15e-6, 40e-6, 0.65, 0)

CALLS_OF_CODED = 8  # how many operators' time an update with 8-bit states takes on the host


class Columns(NamedTuple):
    """The work of a step as arrays of equal length, an operator an element.

    dtypes: number formats; of: the place in `dtypes` of each operator's, -1 without products.
    phase: the place in `PHASES`. times: how often it runs. coded: as in `count_coded`. The rest is
    as in `Work`.
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
    coded: np.ndarray
    sent: np.ndarray
    carried: np.ndarray
    cards: np.ndarray
    waited: np.ndarray

    @classmethod
    def from_counter(cls, work: Counter[Work]) -> Columns:
        """Of `Work` -> how often."""
        dtypes = sorted({op.dtype for op in work if op.dtype})
        place = {dtype: i for i, dtype in enumerate(dtypes)} | {"": -1}
        rows = [
            (place[op.dtype], op.flops, op.nbytes, op.lists, op.elements,
             PHASES.index(op.phase), op.recomputed, times, op.sent, op.carried, op.cards,
             op.waited, *(op.result or (0, 0, 0)))
            for op, times in work.items()
        ]  # fmt: skip
        table = np.array(rows, float).reshape(-1, 15).T
        of, flops, nbytes, lists, elements, phase, again, times, *between = table[:12]
        of, phase, lists = of.astype(int), phase.astype(int), lists.astype(int)
        tiles = count_tiles(table[12:].T, [op.dtype for op in work])
        kernels = count_kernels(lists, elements)
        coded = count_coded(lists, elements)
        again = again > 0
        return cls(dtypes, of, flops, tiles, nbytes, kernels, phase, again, times, coded, *between)


# The range where a step of the card has been measured: so far are nine of ten ratios of two
# published steps of one model on one card from the ratio of their estimates.
ANCHORED = 1.27


def step_time(
    work: Counter[Work], gpu: GPU, samples: int | None = None, link: str | None = None
) -> StepTime:
    """The estimated seconds of a step's work on a card.

    Products of fp32 are in tf32 where PyTorch allows that now, on a card that has it.
    samples: sequences in the step. link: between ranks, as in `memlab.card.links.link_rate`.

    Raises ValueError for a card without rates, for a number format that it has no rate for, and for
    a link that it does not have.
    """
    columns = Columns.from_counter(work)
    allowed = _allows_tf32()  # of today: a trace is older
    dtypes = ["tf32" if allowed and dtype == "float32" else dtype for dtype in columns.dtypes]
    rates = _rates(dtypes, gpu)
    reached = np.array([gpu.reached(dtype) for dtype in dtypes] + [(1.0, 1.0, 1.0)]).T
    sent = float(np.sum(columns.sent * columns.times))
    over = _over(columns.cards, gpu, link) if sent or link else np.inf
    to_host = host_rate(gpu) if np.any(columns.carried) else np.inf
    parts = _seconds(columns, reached[1], gpu, EXPECTED, over, to_host)
    expected = sum(parts.values())
    if gpu.pace:
        parts = {name: gpu.pace * seconds for name, seconds in parts.items()}
        expected *= gpu.pace
        low, high = expected / ANCHORED, expected * ANCHORED
    else:
        low = sum(_seconds(columns, reached[2], gpu, BEST, over, to_host).values())
        high = sum(_seconds(columns, reached[0], gpu, WORST, over, to_host).values())
    useful = ~columns.recomputed & (columns.of >= 0)
    return StepTime(
        low=low,
        expected=expected,
        high=high,
        parts=parts,
        flops=round(float(columns.flops[useful] @ columns.times[useful])),
        peak_rate=max((rates[i] for i in set(columns.of[useful])), default=0.0),
        samples=samples,
        sent=round(sent),
    )


def _over(cards: np.ndarray | int, gpu: GPU, link: str | None) -> np.ndarray:
    """Bytes per second of each operator's group, if it has one."""
    kinds, of = np.unique(cards, return_inverse=True)
    return np.array([link_rate(gpu, link, int(kind)) for kind in kinds])[of]


def _allows_tf32() -> bool:
    """Whether PyTorch computes products of fp32 in tf32; where it is not imported, whether it will.

    aten/src/ATen/Context.cpp: not, unless the environment says so. `allow_tf32` sets this precision
    too, but may not be read any more where somebody has set the precision itself.
    """
    if "torch" in sys.modules:
        return sys.modules["torch"].backends.cuda.matmul.fp32_precision == "tf32"
    return os.environ.get("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE") == "1"


def _rates(dtypes: list[str], gpu: GPU) -> list[float]:
    """The card's rate for each of the formats."""
    if gpu.bandwidth is None:
        raise ValueError(f"{gpu.name} has no rates, and so no seconds: name a card, such as T4")
    rates = []
    for dtype in dtypes:
        rate = gpu.rate(dtype)
        if rate is None:
            allowed = ", ".join(gpu.rates)
            raise ValueError(f"{gpu.name} has no rate for {dtype}: it has those of {allowed}")
        rates.append(rate)
    return rates


def _seconds(
    columns: Columns,
    reached: np.ndarray,
    gpu: GPU,
    reach: Efficiency,
    over: np.ndarray | float,
    to_host: float,
) -> dict[str, float]:
    """Seconds by part; they sum to the step's. reached: of each format, the last without one."""
    share = np.where(columns.tiles > 0, reach.products, reach.of_attention(gpu))
    busy_share = busy(columns.tiles, gpu.processors)
    by_flops = columns.flops / (reached[columns.of] * share * busy_share)
    near = np.where(columns.nbytes <= gpu.cache / 2, reach.cache, 1)
    by_bytes = columns.nbytes / (gpu.traffic * reach.memory * near)
    by_clocks = columns.coded * reach.coded / (gpu.processors * gpu.clock)
    shortest = columns.kernels * reach.kernel
    each = np.maximum(np.maximum(by_flops, by_bytes), np.maximum(by_clocks, shortest))
    longest = each * columns.times
    called = np.array([*map(reach.host, PHASES)])[columns.phase]
    called = np.where(columns.recomputed, reach.forward, called)
    called = np.where(columns.coded > 0, CALLS_OF_CODED, 1) * called
    host = columns.kernels * columns.times * called
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
    by_phase = (
        np.bincount(columns.phase, seconds_of, len(PHASES)) for seconds_of in (host, longest)
    )
    on_host, on_card = by_phase
    parts["waiting for launches"] = float(np.maximum(0, on_host - on_card).sum())
    seconds = columns.sent * columns.times / (over * reach.link)
    not_waited = np.broadcast_to(seconds * (1 - columns.waited), columns.phase.shape)
    sending = np.bincount(columns.phase, not_waited, len(PHASES))
    hidden = reach.hidden * np.minimum(sending, np.maximum(on_host, on_card))
    hidden[PHASES.index(Phase.STEP)] = 0  # the updated weights are sent when all is done
    parts["communication"] = float((sending - hidden).sum() + np.sum(seconds * columns.waited))
    copies = columns.carried * columns.times / (to_host * reach.link)
    parts["copies to the host and back"] = float(np.sum(copies))
    return parts


def busy(tiles: np.ndarray, processors: int) -> np.ndarray:
    """The share of a card's processors that a product keeps at work, from 0 to 1.

    A product's result is computed tile by tile, one a processor at a time, and the last round of
    tiles is seldom full: "wave quantization" in NVIDIA's "Matrix multiplication background user's
    guide". cuBLAS has other tiles, too, which fill the rounds better and are less efficient each;
    here all are of one size (`memlab.trace.work`).
    """
    rounds = np.ceil(tiles / processors)
    return np.where(tiles > 0, tiles / np.maximum(rounds * processors, 1), 1.0)
