"""Scratch of CUDA kernels against what their source says."""

import pytest
import torch

from memlab.card.kernels.scratch import kernel_scratch, reduction_of


@pytest.mark.parametrize("name", ["native_layer_norm_backward", "_fused_rms_norm_backward"])
def test_backward_of_a_norm_copies_a_gradient_that_is_not_contiguous(name):
    """A sum's gradient is one number, expanded."""
    func = getattr(torch.ops.aten, name).default
    x, expanded = torch.zeros(10, 4), torch.zeros(()).expand(10, 4)
    assert kernel_scratch(func, (expanded, x, [4])) == [[x.nbytes]]
    assert kernel_scratch(func, (x, x, [4])) == []
    assert kernel_scratch(func, (x, x.t().contiguous().t(), [4])) == [[x.nbytes]]


@pytest.mark.parametrize("key_heads", [4, 2])
def test_flash_backward_sums_the_gradient_of_the_query_in_fp32(key_heads):
    query = torch.zeros(2, 4, 130, 50, dtype=torch.bfloat16)
    key = torch.zeros(2, key_heads, 70, 50, dtype=torch.bfloat16)
    func = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    rows = 4 * 2 * 4 * 256  # lengths in 128
    expanded = [] if key_heads == 4 else 2 * [2 * 4 * 70 * 50 * 2]
    found = kernel_scratch(func, (query, query, key, key))
    assert found == [[rows, 64 * rows, *expanded]]  # head sizes in 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_efficient_backward_sums_the_gradient_of_the_query_in_fp32(dtype):
    """As in a step of BERT base, 8 x 512 in fp32, that PyTorch's profiler listed on an H100."""
    query = torch.zeros(8, 12, 512, 64, dtype=dtype, device="meta")
    func = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    *before, last = kernel_scratch(func, (query, query, query, query))
    rows, sums = last
    assert (rows, sums) == (196_608, 12_582_912)
    assert 12_595_200 - sums == 8 * 12 * 8 * 16  # of the profiler's, what each block has beside it
    assert before == ([[12_582_912, 196_608, 196_608]] if dtype == torch.float32 else [])


@pytest.mark.parametrize(
    ("shape", "dims", "found"),
    [
        ((6, 5), [0], (6, 5)),
        ((2, 3, 5), [0, 1], (6, 5)),
        ((2, 3, 5), [0, -2], (6, 5)),
        ((2, 3, 5), [1], (3, 10)),
        ((6, 5), [1], None),  # neighbours in memory are added
        ((6, 5), [0, 1], None),
        ((6, 1), [0], None),
    ],
)
def test_sums_along_rows(shape, dims, found):
    func = torch.ops.aten.sum.dim_IntList
    assert reduction_of(func, (torch.zeros(shape), dims, False)) == found
    assert reduction_of(func, (torch.zeros(shape, dtype=torch.int64), dims, False)) is None
    assert reduction_of(torch.ops.aten.mul.Tensor, (torch.zeros(shape), dims)) is None


def test_a_sum_along_rows_may_come_in_another_order():
    """The gradient of a norm of heads: [batch, heads, length, size], the heads after the length."""
    x = torch.zeros(2, 4, 3, 5).transpose(1, 2)
    assert reduction_of(torch.ops.aten.sum.dim_IntList, (x, [0, 1, 2])) == (24, 5)
