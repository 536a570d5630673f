"""Estimates the seconds of a step from its work: a roofline per kernel, and the host's launches.

A kernel takes the longest of several times. Its operations run at the rate that large matrix
products reach on the GPU (`memlab.gpus.GPU.reached`). Its bytes move at the share of the bandwidth
that kernels reach, or faster if they fit into half of the L2 cache. An 8-bit optimizer update takes
clock cycles per element. And no kernel is shorter than a minimum.

The host launches kernels into a queue, so the GPU waits only if launching takes longer than
running. A phase (forward, backward, optimizer step) therefore takes the longer of its kernels'
time and its operators' time on the host. Copies between GPU and host add their bytes at the rate of
PCI Express. Collectives send their bytes at the link's rate. They count in full if the next kernels
wait for them, as in tensor parallelism, and otherwise as far as they outlast their phase.

Known limitations: the host's own work between steps is left out, and so are loading and copying
batches. Pages that the driver moves between host and GPU do not count, nor do slowdowns of a hot or
shared GPU.
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
    """Which share of a GPU's measured rates programs reach, and how long the host takes.

    One set of values holds for all recipes and, but for `on_hopper`, for all GPUs.

    products: share of the rate of large products, after idle processors (`busy`) are counted.
    attention: the same share for fused attention, and for other products without tiles.
    on_hopper: `attention` on a GPU of compute capability 9.0.
    memory: factor on the bytes per second that kernels reach on the GPU (`GPU.traffic`).
    cache: how many times faster than its memory the L2 cache is.
    coded: clock cycles of a processor per element of a weight with 8-bit states.
    kernel: seconds of the shortest kernel.
    forward: the host's seconds per operator of a forward pass in training, or of its recomputation.
    backward: the host's seconds per operator of a backward pass.
    update: the host's seconds per operator of an optimizer step.
    inference: the host's seconds per operator of a pass without gradients.
    link: share of a link's rate.
    hidden: share of the collectives of a forward or backward pass that overlaps with its kernels,
        as long as these run. Collectives that kernels wait for never overlap.
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
        """The share of the rate of large products that attention reaches on a GPU."""
        return self.on_hopper if gpu.capability == (9, 0) else self.attention

    def host(self, phase: Phase) -> float:
        """The host's seconds per operator of a phase."""
        named = {Phase.FORWARD: self.forward, Phase.BACKWARD: self.backward}
        named |= dict.fromkeys((Phase.STEP, Phase.ZERO_GRAD), self.update)
        return named.get(phase, self.inference)


# Sources of the values. Training runs were used for three of them only: `cache`, the seconds of the
# host, and the 8-bit states.
# - products 0.92: 183 shapes of products from the layers of Llama and DeepSeek were measured in
#   bf16 on an A100 (SimuMax at 4dcaae5, configs/system/a100_pcie.json). Their median is 0.72 of the
#   data sheet, where large square matrices reach 0.77. For NeuSight's fp32 products above 3 GFLOP,
#   the median is 0.93 to 1 of the largest, after rounds of tiles are counted.
# - attention 0.6: FlashAttention-2 reaches 0.5 to 0.73 of an A100's data sheet, forward and
#   backward (Dao 2023).
# - on_hopper 0.44: FlashAttention-2 reaches 0.35 of an H100's data sheet, whose newer instructions
#   it does not use (Shah et al. 2024, "FlashAttention-3"). Large products reach 0.8 there.
# - cache 2: assumed. An A100 reads 5,120 bytes per clock from its L2 cache, 4.6 times its memory's
#   rate (NVIDIA, "A100 Tensor Core GPU architecture"). But results go on to the memory. Without
#   such a rule, the steps of PEFT's runs on an L40S came out a fifth too long. Values from 1.5 to 3
#   fit these runs about as well.
# - kernel 3 us: in a queue, one kernel after another takes 2.9 to 3.8 us on a V100 (Gray 2019,
#   "Getting started with CUDA graphs").
# - inference 20 us: a layer launches some 41 kernels. In transformers' eager decoding, a token
#   takes 0.84 to 0.90 ms per layer at every size from 0.5B to 32B (Qwen's speed benchmarks).
# - forward 35 us, backward 18 us, update 10 us: an operator takes longer with gradients. The best
#   fit to 31 runs on an H100 of a cloud is 40, 20 and 10 us. The best fit to PEFT's runs on an L40S
#   is 26 us forward. 35 and 18 us lie in between.
# - coded 8 clocks, and CALLS_OF_CODED: what remains of the steps of four of those 31 runs, which
#   use bitsandbytes 0.50. Its kernel has one thread per element, which searches two tables. Its
#   Python code calls the kernel once per weight.
# - link 0.8: NCCL's all-gather passes on 360 of an H100's 450 GB/s of NVLink (nccl-tests#326).
# - hidden 1: FSDP and DDP start a collective while the layer before or after computes (PyTorch's
#   documentation of fully_shard, "prefetching"; Li et al. 2020, "PyTorch distributed").
EXPECTED = Efficiency(0.92, 0.6, 0.44, 1, 2, 8, 3e-6, 35e-6, 18e-6, 10e-6, 20e-6, 0.8, 1)
# The ends of the estimate's range: a good and a bad program, GPU and day. These are judgements, not
# measurements.
BEST = Efficiency(1, 0.8, 0.8, 1.2, 3, 4, 2e-6, 20e-6, 10e-6, 5e-6, 10e-6, 0.92, 1)
WORST = Efficiency(0.7, 0.4, 0.3, 0.75, 1, 12, 5e-6, 60e-6, 30e-6, 15e-6, 40e-6, 0.65, 0)

# The host's time for an 8-bit update of one weight, in operators of an optimizer step.
CALLS_OF_CODED = 8


class Columns(NamedTuple):
    """The work of a step as columns of a table with one row per distinct operator.

    All fields but the first are arrays of equal length.

    dtypes: the dtypes that products are computed in.
    of: index into `dtypes` of each operator's dtype; -1 for an operator without products.
    phase: index into `PHASES`.
    times: how often the operator runs.
    coded: elements with 8-bit states, as in `memlab.trace.work.count_coded`.

    The other columns are the fields of `Work`.
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
        """Build the columns from a counter of `Work` -> how often."""
        dtypes = sorted({op.dtype for op in work if op.dtype})
        place = {dtype: i for i, dtype in enumerate(dtypes)} | {"": -1}
        rows = [
            (place[op.dtype], op.flops, op.nbytes, op.lists, op.elements,
             PHASES.index(op.phase), op.recomputed, times, op.sent, op.carried, op.cards,
             op.waited, *(op.result or (0, 0, 0)))
            for op, times in work.items()
        ]  # fmt: skip
        # reshape keeps an empty table two-dimensional. Columns 12 to 14 are `result`.
        table = np.array(rows, float).reshape(-1, 15).T
        of, flops, nbytes, lists, elements, phase, again, times, *between = table[:12]
        of, phase, lists = of.astype(int), phase.astype(int), lists.astype(int)
        tiles = count_tiles(table[12:].T, [op.dtype for op in work])
        kernels = count_kernels(lists, elements)
        coded = count_coded(lists, elements)
        again = again > 0
        return cls(dtypes, of, flops, tiles, nbytes, kernels, phase, again, times, coded, *between)


# The factor between an anchored estimate and the ends of its range. It was found on pairs of
# published steps of one model on one GPU. In nine of ten pairs, the ratio of the measured times is
# within this factor of the ratio of the estimates.
ANCHORED = 1.27


def step_time(
    work: Counter[Work], gpu: GPU, samples: int | None = None, link: str | None = None
) -> StepTime:
    """Estimate the seconds of a step's work on a GPU.

    fp32 products count as tf32 if PyTorch allows that now and the GPU has it.

    work: each operator of the step -> how often it runs.
    samples: sequences in the step.
    link: the link between ranks, as in `memlab.card.links.link_rate`.

    Raises ValueError for a GPU without rates, and for a dtype or a link that the GPU does not have.
    """
    columns = Columns.from_counter(work)
    # Asked now, and not when the work was recorded: a stored trace may be older than the setting.
    allowed = _allows_tf32()
    dtypes = ["tf32" if allowed and dtype == "float32" else dtype for dtype in columns.dtypes]
    rates = _rates(dtypes, gpu)
    # Rows: least, expected, most. The last column is for operators without products: columns.of is
    # -1 for them, and their flops are 0.
    reached = np.array([gpu.reached(dtype) for dtype in dtypes] + [(1.0, 1.0, 1.0)]).T
    sent = float(np.sum(columns.sent * columns.times))
    over = _over(columns.cards, gpu, link) if sent or link else np.inf
    to_host = host_rate(gpu) if np.any(columns.carried) else np.inf
    parts = _seconds(columns, reached[1], gpu, EXPECTED, over, to_host)
    expected = sum(parts.values())
    if gpu.pace:  # an anchored GPU: the measured time of a step over its estimate
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
    """Bytes per second at which each operator's collective sends, by the GPUs in its group."""
    kinds, of = np.unique(cards, return_inverse=True)
    return np.array([link_rate(gpu, link, int(kind)) for kind in kinds])[of]


def _allows_tf32() -> bool:
    """Whether PyTorch computes fp32 products in tf32, or would if it were imported.

    aten/src/ATen/Context.cpp: by default it does not, unless the environment variable below is set.
    `fp32_precision` is read here because `allow_tf32` sets it too, and because reading `allow_tf32`
    raises an error once code has set the precision itself.
    """
    if "torch" in sys.modules:
        return sys.modules["torch"].backends.cuda.matmul.fp32_precision == "tf32"
    return os.environ.get("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE") == "1"


def _rates(dtypes: list[str], gpu: GPU) -> list[float]:
    """The GPU's data-sheet rate for each dtype, in operations per second."""
    if gpu.bandwidth is None:
        raise ValueError(
            f"{gpu.name} has no rates, and therefore no seconds: name a card, such as T4"
        )
    rates = []
    for dtype in dtypes:
        rate = gpu.rate(dtype)
        if rate is None:
            allowed = ", ".join(gpu.rates)
            raise ValueError(f"{gpu.name} has no rate for {dtype}: it has rates for {allowed}")
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
    """Seconds by part; the parts sum to the seconds of the step.

    reached: operations per second of each dtype, and a last value for operators without products.
    over: bytes per second of each collective. to_host: bytes per second of PCI Express.
    """
    # Each kernel takes the longest of four times, all arrays over the operators.
    share = np.where(columns.tiles > 0, reach.products, reach.of_attention(gpu))
    busy_share = busy(columns.tiles, gpu.processors)
    by_flops = columns.flops / (reached[columns.of] * share * busy_share)
    # Most of what an operator reads was just written by the one before, so it may still be in L2.
    # Half of the cache, because the results need room too.
    near = np.where(columns.nbytes <= gpu.cache / 2, reach.cache, 1)
    by_bytes = columns.nbytes / (gpu.traffic * reach.memory * near)
    by_clocks = columns.coded * reach.coded / (gpu.processors * gpu.clock)
    shortest = columns.kernels * reach.kernel
    each = np.maximum(np.maximum(by_flops, by_bytes), np.maximum(by_clocks, shortest))
    longest = each * columns.times
    # The host's time, launch by launch. A recomputed forward pass is in the backward phase, but its
    # operators take as long on the host as those of any forward pass.
    called = np.array([*map(reach.host, PHASES)])[columns.phase]
    called = np.where(columns.recomputed, reach.forward, called)
    called = np.where(columns.coded > 0, CALLS_OF_CODED, 1) * called
    host = columns.kernels * columns.times * called
    # Every operator belongs to exactly one of the four parts.
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
    # The GPU idles for as long as the host takes longer, phase by phase.
    parts["waiting for launches"] = float(np.maximum(0, on_host - on_card).sum())
    # A collective overlaps with the kernels of its phase, or with the host that launches them.
    seconds = columns.sent * columns.times / (over * reach.link)
    not_waited = np.broadcast_to(seconds * (1 - columns.waited), columns.phase.shape)
    sending = np.bincount(columns.phase, not_waited, len(PHASES))
    hidden = reach.hidden * np.minimum(sending, np.maximum(on_host, on_card))
    hidden[PHASES.index(Phase.STEP)] = 0  # the updated weights are sent after all kernels
    parts["communication"] = float((sending - hidden).sum() + np.sum(seconds * columns.waited))
    copies = columns.carried * columns.times / (to_host * reach.link)
    parts["copies to the host and back"] = float(np.sum(copies))
    return parts


def busy(tiles: np.ndarray, processors: int) -> np.ndarray:
    """The share of a GPU's processors that a matrix product keeps busy, from 0 to 1.

    A processor computes one tile of the result at a time, and the last round of tiles is seldom
    full. NVIDIA's "Matrix multiplication background user's guide" calls this wave quantization.
    Operators without tiles count as 1.

    Known limitations: all tiles have one size here (`memlab.trace.work`). cuBLAS also has smaller
    ones, which fill the rounds better and are less efficient each.
    """
    rounds = np.ceil(tiles / processors)
    return np.where(tiles > 0, tiles / np.maximum(rounds * processors, 1), 1.0)
