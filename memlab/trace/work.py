"""The work of a step's operators as numbers: operations, bytes, kernel launches, tiles.

`memlab.card.op_work` counts it while a step runs, and stored traces contain it. Nothing here needs
PyTorch, so that stored traces can be evaluated without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from memlab.footprint import Phase

CARDS = 8  # GPUs of a machine, as `memlab.card.links` assumes


class Work(NamedTuple):
    """The work of one operator, as a key of a Counter.

    flops: floating-point (or integer) operations of its matrix products.
    dtype: format of these products, such as "float32"; empty without products.
    result: (matrices, rows, columns) of the products' results; empty if the kernel does not split
    the work into tiles of the result, as in attention.
    moved: bytes of each tensor that is read or written, ascending.
    lists: for a multi-tensor kernel, the number of its tensor lists; this is the work on one tensor
    of each. 0 for an operator with a kernel of its own.
    elements: elements of each such tensor. Without lists, the weights that bitsandbytes updates
    with 8-bit states, which are read and written through code tables (`CODED` in
    `memlab.card.op_work`); otherwise 0.
    recomputed: whether it belongs to a forward pass that activation checkpointing repeats.
    micro_batch: index of the micro-batch in the step; `memlab.trace.log.UPDATE` once the loop says
    that all gradients are complete.
    sent: bytes that a collective sends to other ranks (`memlab.card.collectives`).
    carried: bytes of a copy between the GPU and its host, if at least `TRIFLE`.
    cards: GPUs of the same machine in the collective's group, as in `memlab.card.links.link_rate`.
    waited: whether kernels wait for the collective (`memlab.card.collectives.is_waited_for`).
    """

    flops: int = 0
    dtype: str = ""
    result: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()
    lists: int = 0
    elements: int = 0
    phase: Phase = Phase.BACKWARD
    recomputed: bool = False
    micro_batch: int = 0
    sent: int = 0
    carried: int = 0
    cards: int = CARDS
    waited: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes read and written."""
        return sum(self.moved)

    def sized(self, number: Callable[..., int]) -> Work:
        """The work at other sizes; number: maps a number at the recorded sizes to one at these.

        For flops it gets `whole=True`, as `memlab.trace.symbols.Symbols.term` explains.
        """
        return self._replace(
            flops=number(self.flops, whole=True),
            result=tuple(map(number, self.result)),
            moved=tuple(sorted(map(number, self.moved))),
            elements=number(self.elements),
            sent=number(self.sent),
            carried=number(self.carried),
        )


def repeat_micro_batch(work: Counter, times: int) -> Counter:
    """The work of a step whose second micro-batch, forward and backward, runs `times` times."""

    def often(work: Work) -> int:
        return times if work.micro_batch == 1 and work.phase != Phase.STEP else 1

    return Counter({operator: n * often(operator) for operator, n in work.items()})


# An operator that moves fewer bytes takes less time than its launch, so its bytes do not matter.
# Every GPU moves at least 100 GB/s, which is 200 KB during the fastest launch, 2 us.
TRIFLE = 64 * 1024
# Limit for the norms of all weights, which move and send other numbers of bytes at each depth.
NORMS = 4 * 1024


def drop_small_ops(work: Iterable[Work], least: int = TRIFLE) -> Counter:
    """The work, without the bytes of operators that only move less than `least` bytes.

    What a collective sends is dropped below `NORMS` bytes. Operators that become equal are counted
    together.
    """
    counted: Counter = Counter()
    for operator, times in Counter(work).items():
        # The tensors of a list share a launch, so each of them may be small and still matter.
        small = not operator.flops and not operator.lists and operator.nbytes < least
        sent = operator.sent if operator.sent >= NORMS else 0
        moved = ((), 0) if small else (operator.moved, operator.elements)
        counted[operator._replace(moved=moved[0], elements=moved[1], sent=sent)] += times
    return counted


# Limits of a launch in aten/src/ATen/native/cuda/MultiTensorApply.cuh: tensors, by the number of
# lists (depth_to_max_tensors); blocks (depth_to_max_blocks); elements of a block (kChunkSize).
# NB these are the limits of builds for CUDA 12 and older, with 4 KB of kernel arguments. Builds for
# CUDA 13 have 32 KB, and seven times as many tensors and blocks.
TENSORS_OF_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
BLOCKS_OF_LAUNCH, ELEMENTS_OF_BLOCK = 320, 65536


def count_kernels(lists: np.ndarray, elements: np.ndarray) -> np.ndarray:
    """Kernels that each operator launches; for a tensor of a list, its share of the launches.

    lists, elements: arrays of these fields of `Work`.
    """
    # Index 0 is for operators without lists; its value is not used. More than five count as five.
    tensors = np.array([1, *TENSORS_OF_LAUNCH.values()])[np.minimum(lists, len(TENSORS_OF_LAUNCH))]
    blocks = np.ceil(np.divide(elements, ELEMENTS_OF_BLOCK))
    # A launch is full when it has its tensors or its blocks, whichever comes first.
    launches = np.maximum(1 / tensors, blocks / BLOCKS_OF_LAUNCH)
    return np.where(np.greater(lists, 0), launches, 1)


def count_coded(lists: np.ndarray, elements: np.ndarray) -> np.ndarray:
    """Elements with 8-bit states that each operator updates; arguments as for `count_kernels`."""
    return np.where(np.greater(lists, 0), 0, elements)


# (rows, columns) of a result that one multiprocessor computes at a time. They are taken from the
# names of cuBLAS kernels in public profiles: volta_sgemm_128x64_nn,
# volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn,
# ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn.
TILES = {"float32": (128, 64)}
TENSOR_CORE_TILE = (128, 128)


def count_tiles(results: Any, dtypes: Any) -> np.ndarray:
    """Tiles of each operator's result, each computed by one multiprocessor; 0 without a result.

    results: (matrices, rows, columns) per operator, an array of shape [operators, 3]. dtypes: their
    formats.
    """
    matrices, rows, columns = np.asarray(results, float).reshape(-1, 3).T
    high, wide = np.array([TILES.get(dtype, TENSOR_CORE_TILE) for dtype in dtypes]).T
    return matrices * np.ceil(rows / high) * np.ceil(columns / wide)
