"""What the operators of a step do, as numbers: operations, bytes, kernels, tiles.

`memlab.card.op_work` counts them while a step runs; a kept trace has them, and what is read of them
needs no PyTorch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from memlab.footprint import Phase

CARDS = 8  # of a machine, on whose links between cards `memlab.card.links` counts


class Work(NamedTuple):
    """What one operator does, as one key of a Counter.

    flops: floating-point (or integer) operations of matrix products.
    dtype: what these are computed in, "float32", "float16", ...; empty without products.
    result: (matrices, rows, columns) of the products' results; empty where kernels share the work
    otherwise than by tiles, as attention does.
    moved: bytes of each tensor that is read or written, in order.
    lists: how many lists of tensors one launch goes through, of which this is one tensor of each;
    0 for an operator with a kernel of its own.
    elements: of each tensor of the lists; without lists those with states in 8 bits, which are
    read and written by a table (`CODED`).
    recomputed: whether it is a forward pass that activation checkpointing repeats.
    micro_batch: its number in the step, from 0, and `UPDATE` where the loop says that its gradients
    are all there.
    sent: bytes that a collective sends to other ranks (`memlab.card.collectives`).
    carried: bytes that go from the card to its host or back, by a copy of at least `TRIFLE`.
    cards: of a machine, that are in the collective's group, as in `memlab.card.links.link_rate`.
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
        """The same with other numbers; number: the function from one to the other.

        It is told of operations that they are a whole number of times the product of some sizes.
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
    """The work of a step whose second micro-batch, forward and backward, comes so many times."""

    def often(work: Work) -> int:
        return times if work.micro_batch == 1 and work.phase != Phase.STEP else 1

    return Counter({operator: n * often(operator) for operator, n in work.items()})


# What moves less takes a card less than a launch does, and its bytes need no telling apart: no card
# moves less than 100 GB/s, which is 200 KB in the 2 us of the quickest launch.
TRIFLE = 64 * 1024
NORMS = 4 * 1024  # what the norms of all weights move and ranks send of them, more at each depth


def drop_small_ops(work: Iterable[Work], least: int = TRIFLE) -> Counter:
    """The work; what only moves less than `least`, or sends little, has no bytes in it."""
    counted: Counter = Counter()
    for operator, times in Counter(work).items():
        small = not operator.flops and not operator.lists and operator.nbytes < least
        sent = operator.sent if operator.sent >= NORMS else 0
        moved = ((), 0) if small else (operator.moved, operator.elements)
        counted[operator._replace(moved=moved[0], elements=moved[1], sent=sent)] += times
    return counted


# aten/src/ATen/native/cuda/MultiTensorApply.cuh: a launch takes so many tensors, by the number of
# lists, and so many blocks, each of so many elements.
TENSORS_OF_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
BLOCKS_OF_LAUNCH, ELEMENTS_OF_BLOCK = 320, 65536


def count_kernels(lists: np.ndarray, elements: np.ndarray) -> np.ndarray:
    """How many kernels operators launch, a part of one for a tensor of a list.

    lists, elements: as in `Work`, an array each.
    """
    tensors = np.array([1, *TENSORS_OF_LAUNCH.values()])[np.minimum(lists, len(TENSORS_OF_LAUNCH))]
    blocks = np.ceil(np.divide(elements, ELEMENTS_OF_BLOCK))
    launches = np.maximum(1 / tensors, blocks / BLOCKS_OF_LAUNCH)
    return np.where(np.greater(lists, 0), launches, 1)


def count_coded(lists: np.ndarray, elements: np.ndarray) -> np.ndarray:
    """Elements whose 8-bit states operators read and write by a table; as `count_kernels`."""
    return np.where(np.greater(lists, 0), 0, elements)


# Rows and columns of a result that one processor computes at a time, as names of cuBLAS' kernels in
# public profiles have them: volta_sgemm_128x64_nn, volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn,
# ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn.
TILES = {"float32": (128, 64)}
TENSOR_CORE_TILE = (128, 128)


def count_tiles(results: Any, dtypes: Any) -> np.ndarray:
    """Tiles of products' results, each one processor's work; 0 where there is no result.

    results: (matrices, rows, columns) of each, an array of shape [operators, 3]; dtypes: of each.
    """
    matrices, rows, columns = np.asarray(results, float).reshape(-1, 3).T
    high, wide = np.array([TILES.get(dtype, TENSOR_CORE_TILE) for dtype in dtypes]).T
    return matrices * np.ceil(rows / high) * np.ceil(columns / wide)
