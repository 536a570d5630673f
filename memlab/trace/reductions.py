"""The buffer in which CUDA's sums along rows keep the sums of their thread blocks.

Such a sum has a result for each column of a matrix, as the gradient of a bias has. Where a column
is long and there are processors left, several thread blocks sum parts of it, each into a place of
its own in a buffer that the kernel takes from PyTorch's allocator and gives back:
`setReduceConfig` and `gpu_reduce_kernel` in aten/src/ATen/native/cuda/Reduce.cuh.
"""

import math
from typing import NamedTuple

ACCUMULATED = 4  # bytes of a sum: of fp32, and of halves, which are added in fp32
THREADS = 512  # of a block, divided by the columns that a thread reads at once
WARP = 32
# Values that a thread adds at least, and at most, before its column is divided among blocks.
LEAST, MOST = 16, 256
UNLIMITED = 2**62  # threads of a card on which every sum that is long enough has a buffer


class Reduction(NamedTuple):
    """A matrix [rows, columns] that is summed along its rows, neighbours in memory in one row."""

    rows: int
    columns: int

    def buffer(self, threads: int) -> int:
        """Bytes of the buffer, 0 for none, on a card that holds so many threads at once.

        Of a matrix of less than 2^31 numbers: the kernel cuts larger ones, and sums up each piece.
        The counters of finished blocks, 512 bytes, are not in it.
        """
        rows, columns = int(self.rows), int(self.columns)
        at_once = math.gcd(columns, 4)
        most = THREADS // at_once
        wide, high = (min(last_power_of_two(n), most) for n in (columns // at_once, rows))
        width = min(wide, WARP)
        height = min(high, most // width)
        width = min(wide, most // height)
        if rows < min(height * LEAST, MOST):
            return 0  # a warp sums whole columns
        values = -(-rows // height)
        grid = -(-(columns // at_once) // width)
        wanted = threads // (width * height)
        if values < MOST or grid > wanted:
            return 0
        blocks = max(min(-(-wanted // grid), -(-values // LEAST)), -(-values // MOST))
        return ACCUMULATED * columns * blocks * width * at_once if blocks > 1 else 0


def last_power_of_two(number: int) -> int:
    """The largest power of two up to a number, at least 1."""
    return 1 << max(0, number.bit_length() - 1)
