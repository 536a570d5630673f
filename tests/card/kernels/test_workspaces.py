"""Scratch of CUDA kernels against what their source says."""

import pytest
import torch

from memlab.card.kernels.workspaces import kernel_scratch


def test_softmax_backward_takes_a_temporary():
    grad, out = torch.zeros(10, 10), torch.zeros(10, 10)
    func = torch.ops.aten._softmax_backward_data.default
    assert kernel_scratch(func, (grad, out, -1, torch.float32)) == [grad.nbytes]
    assert kernel_scratch(torch.ops.aten.mul.Tensor, (grad, out)) == []


@pytest.mark.parametrize("name", ["native_layer_norm_backward", "_fused_rms_norm_backward"])
def test_backward_of_a_norm_copies_a_gradient_that_is_not_contiguous(name):
    """A sum's gradient is one number, expanded."""
    func = getattr(torch.ops.aten, name).default
    x, expanded = torch.zeros(10, 4), torch.zeros(()).expand(10, 4)
    assert kernel_scratch(func, (expanded, x, [4])) == [x.nbytes]
    assert kernel_scratch(func, (x, x, [4])) == []
    assert kernel_scratch(func, (x, x.t().contiguous().t(), [4])) == [x.nbytes]


@pytest.mark.parametrize("key_heads", [4, 2])
def test_flash_backward_sums_the_gradient_of_the_query_in_fp32(key_heads):
    query = torch.zeros(2, 4, 130, 50, dtype=torch.bfloat16)
    key = torch.zeros(2, key_heads, 70, 50, dtype=torch.bfloat16)
    func = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    rows = 4 * 2 * 4 * 256  # lengths in 128
    expanded = [] if key_heads == 4 else 2 * [2 * 4 * 70 * 50 * 2]
    found = kernel_scratch(func, (query, query, key, key))
    assert found == [rows, 64 * rows, *expanded]  # head sizes in 32
