"""What CUDA refuses, in its words: against this machine's PyTorch where that has the same."""

import pytest
import torch
from helpers import one_line, refused
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from memlab import SimulatedGPU

HALF, FULL = torch.float16, torch.float32


def ones(device, dtype, *shape):
    return torch.ones(shape, device=device, dtype=dtype)


def attention(device, mask=None, key=HALF):
    query = ones(device, HALF, 1, 1, 4, 8)
    return F.scaled_dot_product_attention(query, query.to(key), query, attn_mask=mask)


SAME_AS_HERE = {  # operations whose check is the same C++ on a CPU
    "linear": lambda d: F.linear(ones(d, HALF, 2, 4), ones(d, FULL, 3, 4), ones(d, FULL, 3)),
    "linear's bias": lambda d: F.linear(ones(d, HALF, 2, 4), ones(d, HALF, 3, 4), ones(d, FULL, 3)),
    "conv2d's bias": lambda d: F.conv2d(
        ones(d, HALF, 1, 3, 8, 8), ones(d, FULL, 2, 3, 3, 3), ones(d, FULL, 2)
    ),
    "attention": lambda d: attention(d, key=FULL),
    "attention's mask": lambda d: attention(d, mask=ones(d, torch.float64, 4, 4)),
    "labels": lambda d: F.binary_cross_entropy(ones(d, HALF, 4), ones(d, FULL, 4)),
}


@pytest.mark.parametrize("name", SAME_AS_HERE)
def test_dtypes_that_differ_are_refused_in_the_words_of_pytorch(name, caplog):
    with pytest.raises(RuntimeError) as real:
        SAME_AS_HERE[name]("cpu")
    with SimulatedGPU("T4"), pytest.raises(RuntimeError) as error:
        SAME_AS_HERE[name]("cuda")
    assert one_line(error) == str(real.value).splitlines()[0]
    assert not caplog.records


ON_CUDA_ALONE = {
    "Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the "
    "same": lambda: F.conv2d(ones("cuda", HALF, 1, 3, 8, 8), ones("cuda", FULL, 2, 3, 3, 3)),
    "expected mat1 and mat2 to have the same dtype, but got: float != c10::Half": lambda: (
        ones("cuda", FULL, 2, 4) @ ones("cuda", HALF, 4, 2)
    ),
    "\"addmm_cuda\" not implemented for 'Long'": lambda: (
        ones("cuda", torch.long, 2, 4) @ ones("cuda", torch.long, 4, 2)
    ),
    "\"addmm_cuda\" not implemented for 'Float8_e4m3fn'": lambda: F.linear(
        *[ones("cuda", torch.float8_e4m3fn, 16, 16)] * 2
    ),
    "\"baddbmm_cuda\" not implemented for 'Int'": lambda: torch.bmm(
        *[ones("cuda", torch.int32, 1, 2, 2)] * 2
    ),
    "expected scalar type Half but found Float": lambda: F.layer_norm(
        ones("cuda", HALF, 2, 4), (4,), ones("cuda", FULL, 4)
    ),
    "expected scalar type BFloat16 but found Float": lambda: F.group_norm(
        ones("cuda", torch.bfloat16, 2, 4), 2, ones("cuda", FULL, 4), ones("cuda", FULL, 4)
    ),
    "'lengths' argument should be a 1D CPU int64 tensor, but got 1D cuda:0 Long tensor": lambda: (
        pack_padded_sequence(ones("cuda", FULL, 2, 3, 4), ones("cuda", torch.long, 2))
    ),
}


@pytest.mark.parametrize("words", ON_CUDA_ALONE)
def test_what_cuda_alone_refuses_is_refused_in_its_words(t4, words):
    with pytest.raises(RuntimeError) as error:
        ON_CUDA_ALONE[words]()
    assert one_line(error) == words


def test_a_loss_of_chances_is_no_operation_for_autocast(t4):
    """CUDA's autocast alone refuses it, whose sums of half precision would overflow."""
    chances = ones("cuda", FULL, 4) / 2
    assert F.binary_cross_entropy(chances, chances) is not None
    with torch.autocast("cuda"), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(chances, chances)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_mask_of_another_shape_is_refused_in_the_words_of_pytorch(t4, place):
    words = r"The shape of the mask \[3, 5\] at index 1 does not match .* \[2, 3, 4\] at index 2"
    with refused(words, kind=IndexError):
        ones(place, FULL, 2, 3, 4)[:, ones(place, torch.bool, 3, 5)]


def test_under_autocast_dtypes_may_differ(t4):
    with torch.autocast("cuda"):
        layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)).cuda()
        layer(ones("cuda", HALF, 2, 4)).sum().backward()


def index(*numbers):
    return torch.tensor(numbers, device="cuda")


OUT_OF_RANGE = {
    "token": lambda: torch.nn.Embedding(10, 4).cuda()(index(1, 10)),
    "label": lambda: F.cross_entropy(ones("cuda", FULL, 2, 10), index(1, 10)),
    "negative label": lambda: F.cross_entropy(ones("cuda", FULL, 2, 10), index(1, -1)),
    "label of an image": lambda: F.cross_entropy(
        ones("cuda", FULL, 1, 5, 1, 2), index(1, 9)[None, None]
    ),
    "gather": lambda: ones("cuda", FULL, 2, 10).gather(1, index(3, 10)[:, None]),
    "index": lambda: ones("cuda", FULL, 10)[index(-11)],
    "index_put": lambda: ones("cuda", FULL, 10).index_put_((index(10),), ones("cuda", FULL, 1)),
    "one_hot": lambda: F.one_hot(index(2, 5), 5),
    "scatter": lambda: ones("cuda", FULL, 4).scatter_(0, index(4), 1.0),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_indices_that_are_known_to_be_out_of_range_end_as_on_a_card(t4, name):
    with refused("device-side assert", kind=RuntimeError):
        OUT_OF_RANGE[name]()


def test_indices_in_range_and_ignored_labels_pass(t4):
    scores = ones("cuda", FULL, 3, 10).requires_grad_()
    F.cross_entropy(scores, index(0, 9, -100)).backward()
    F.cross_entropy(scores, index(0, 9, 10), ignore_index=10).backward()
    assert scores[index(-3, 2)].shape == (2, 10)
    assert scores[index(1, 0, 1) > 0].shape == (2, 10)
