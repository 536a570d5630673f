"""The buffer for partial sums that CUDA's kernel for sums along rows allocates.

Such a sum has one result for each column of a matrix, as the gradient of a bias has. If columns are
long and multiprocessors are left over, several thread blocks share a column. Each writes its
partial sum into a buffer, which the kernel takes from PyTorch's allocator and returns. The rules
are those of `setReduceConfig` and `gpu_reduce_kernel` in aten/src/ATen/native/cuda/Reduce.cuh, as
compiled for CUDA.

Known limitation: PyTorch also reads fewer columns at once if the address or a stride of the matrix
is no multiple of four elements (`get_output_vec_size`). Here it is aligned and contiguous.
"""

import math
from typing import NamedTuple

ACCUMULATED = 4  # sizeof(arg_t): fp32 sums for fp32 and for 16-bit formats
THREADS = 512  # MAX_NUM_THREADS of a block, divided by the columns that a thread reads at once
WARP = 32
LEAST, MOST = 16, 256  # min_values_per_thread, max_values_per_thread
UNLIMITED = 2**62  # threads of a GPU so large that every sum with long enough columns has a buffer


class Reduction(NamedTuple):
    """The sum of a row-major matrix [rows, columns] over its rows, a result for each column."""

    rows: int
    columns: int

    def buffer(self, threads: int) -> int:
        """Bytes of the buffer, 0 for none; threads: how many the GPU keeps resident at once.

        It holds for matrices of less than 2^31 elements: the kernel splits larger ones, and sums
        each piece. The counters of finished blocks (`semaphores`, a block of 512 bytes) are left
        out.
        """
        rows, columns = int(self.rows), int(self.columns)
        at_once = math.gcd(columns, 4)  # output_vec_size: 1, 2 or 4 columns
        most = THREADS // at_once
        # set_block_dimension: a block of width x height threads, both powers of two.
        wide, high = (min(last_power_of_two(n), most) for n in (columns // at_once, rows))
        width = min(wide, WARP)
        height = min(high, most // width)
        width = min(wide, most // height)
        if rows < min(height * LEAST, MOST):
            return 0  # not split_across_warps: each warp sums whole columns
        values = -(-rows // height)  # values_per_thread
        grid = -(-(columns // at_once) // width)  # blocks that read all columns once
        # target_grid_size. PyTorch divides the threads of a single multiprocessor, with the same
        # result. A block has 512 threads or a smaller power of two, and every GPU's limit per
        # multiprocessor is a multiple of 512.
        wanted = threads // (width * height)
        if values < MOST or grid > wanted:
            return 0  # too little work per thread, or enough blocks already
        # ctas_per_output: as many blocks per column as fill the GPU, unless a thread then has fewer
        # than 16 values. In any case, enough blocks that it has at most 256.
        blocks = max(min(-(-wanted // grid), -(-values // LEAST)), -(-values // MOST))
        # global_memory_size, which counts the width of the block although it counts all columns.
        return ACCUMULATED * columns * blocks * width * at_once if blocks > 1 else 0


def last_power_of_two(number: int) -> int:
    """The largest power of two up to a number, at least 1; `last_pow2` in Reduce.cuh."""
    return 1 << max(0, number.bit_length() - 1)
