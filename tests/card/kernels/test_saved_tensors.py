"""Each CUDA rule against what PyTorch documents or does; outside the context nothing is changed."""

import contextlib
import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchgen
import yaml
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memlab import MiB, SimulatedGPU
from memlab.card.kernels.rules import KERNELS, cuda_kernels
from memlab.gpus import ANY_CARD
from memlab.trace.tracer import Tracer


def kept(function, *shapes, dtype=torch.float32):
    """Bytes that `function` adds and keeps for backward, its output included."""
    inputs = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    with Tracer() as tracer:
        out = function(*inputs)
        levels = sum(entry.change for entry in tracer.entries)
    assert out is not None
    return levels


def test_dropout_takes_its_mask_of_one_byte_an_element_first(t4):
    x = torch.zeros(1000, device="cuda", requires_grad=True)
    F.dropout(x, 0.1)
    assert [one.nbytes for one in t4.tracer.storages] == [4000, 1000, 4000]


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_dropout_that_does_nothing_keeps_nothing(p, training):
    x = torch.ones(10, requires_grad=True)
    with cuda_kernels(ANY_CARD):
        assert F.dropout(x, p, training) is x


def test_softmax_to_fp32_makes_no_copy_of_a_half_input():
    with FakeTensorMode():
        function = lambda x: F.softmax(x, -1, dtype=torch.float32)  # noqa: E731
        before = kept(function, (10, 100), dtype=torch.float16)
        with cuda_kernels(ANY_CARD):
            now = kept(function, (10, 100), dtype=torch.float16)
    assert now == 4000 and before >= now


def assert_autocast_as_on_cuda(function, *shapes, dtype=torch.float16):
    """The operators that run are those of PyTorch's own autocast on fake CUDA tensors."""
    heard = {}
    for place in ("cuda", "cpu"):
        with (
            FakeTensorMode(),
            cuda_kernels(ANY_CARD) if place == "cpu" else contextlib.nullcontext(),
            Heard() as heard[place],
            autocast(place),
        ):
            function(*(torch.empty(shape, dtype=dtype, device=place) for shape in shapes))
    assert heard["cpu"].gave == heard["cuda"].gave


class Heard(TorchDispatchMode):
    """The operators that ran, and the dtypes of what they gave; autocast's copies by themselves."""

    def __init__(self):
        super().__init__()
        self.gave = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and func._opname not in ("empty", "new_empty"):
            self.gave.append((str(func), *(one.dtype for one in tree_leaves(out))))
        return out


@contextlib.contextmanager
def autocast(place):
    """`torch.autocast`, which turns itself off for "cuda" on a machine without."""
    torch.set_autocast_enabled(place, True)
    torch.set_autocast_dtype(place, torch.float16)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(place, False)


WIDE = (4, 8)
CLASSES = lambda x: torch.zeros(4, dtype=torch.long, device=x.device)  # noqa: E731
PLACES = lambda x: torch.zeros(4, 8, dtype=torch.long, device=x.device)  # noqa: E731


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.softmax(x, -1),
        lambda x: F.log_softmax(x, -1),
        lambda x: F.layer_norm(x, (8,)),
        lambda x: F.layer_norm(x, (4, 8), x.float()),
        lambda x: F.group_norm(x, 2),
        lambda x: x.exp().log1p(),
        lambda x: x.pow(2) + 2**x,
        lambda x: torch.rsqrt(x),
        lambda x: x.sum(-1) * x.sum() * x.cumsum(-1).prod(),
        lambda x: x.sum(-1, dtype=torch.float16),
        lambda x: x.norm() + x.norm(dim=-1) + torch.linalg.vector_norm(x, dim=0).sum(),
        lambda x: F.normalize(x) + x.logsumexp(-1, keepdim=True),
        lambda x: F.cosine_similarity(x, x),
        lambda x: F.cross_entropy(x, CLASSES(x)),
        lambda x: F.cross_entropy(x, CLASSES(x), label_smoothing=0.1),
        lambda x: F.cross_entropy(x, x.softmax(-1)),
        lambda x: F.nll_loss(x, CLASSES(x)) + F.mse_loss(x, x) + F.kl_div(x, x),
        lambda x: F.binary_cross_entropy_with_logits(x, x),
        lambda x: F.gelu(x) + F.silu(x) + torch.tanh(x) + torch.relu(x),
        lambda x: x.float() @ x.T,
        lambda x: F.linear(x.float(), x.float()),
        lambda x: torch.addcmul(x.float(), x, x) + torch.addcmul(x, x, x),
        lambda x: x.float().scatter_add(0, PLACES(x), x),
        lambda x: x.float().index_put((CLASSES(x),), x),
        lambda x: torch.cat([x, x.float()]) + torch.stack([x, x.float()]).flatten(0, 1),
    ],
    ids=itertools.count(),
)
def test_autocast_does_what_it_does_on_cuda(function):
    assert_autocast_as_on_cuda(function, WIDE)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.interpolate(x, scale_factor=2.0),
        lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
        lambda x: F.interpolate(x, size=(3, 3), mode="bicubic", antialias=True),
        lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
        lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
        lambda x: F.avg_pool2d(F.max_pool2d(x, 2), 2),
    ],
    ids=itertools.count(),
)
def test_autocast_treats_pictures_as_on_cuda(function):
    assert_autocast_as_on_cuda(function, (2, 4, 8, 8))


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x: F.rms_norm(x, (8,)), torch.float32),
        (lambda x: F.grid_sample(x, x[..., :2], align_corners=False), torch.float16),
        (lambda x: F.grid_sample(x, x[..., :2].float(), align_corners=False), torch.float32),
    ],
)
def test_autocast_of_what_fake_cuda_tensors_do_not_run(function, dtype):
    """Its policies are in autocast_mode.h: fp32, and the widest of its tensors."""
    with FakeTensorMode(), cuda_kernels(ANY_CARD), autocast("cpu"):
        assert function(torch.empty(2, 4, 8, 8, dtype=torch.float16)).dtype == dtype


def test_autocast_changes_what_it_changes_on_cuda():
    """Each operator of its list on CUDA is in a CPU's, or in ours."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if has(name, "AutocastCUDA") and not has(name, "AutocastCPU")
    }
    ours = {kernel.operator for kernel in KERNELS if kernel.rule == "autocast"}
    # Products that are taken apart into others of the list, and what only a card has.
    products = "convolution _convolution einsum chain_matmul linalg_multi_dot addmv addr mv "
    products += "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
    cards = "_thnn_fused_lstm_cell _thnn_fused_gru_cell cudnn_convolution "
    cards += "cudnn_convolution_transpose _scaled_dot_product_flash_attention"
    # Builds with CUDA list one more.
    assert names - ours - {"_cudnn_rnn"} == set((products + cards).split())


@pytest.mark.parametrize("weight", [None, torch.float16, torch.float32])
def test_rms_norm_keeps_its_input_and_a_number_a_row(weight):
    """As `rms_norm_symint` says: not where the dtypes of input and weight differ."""

    def kept_of(shape):
        with FakeTensorMode(), cuda_kernels(ANY_CARD):
            scale = weight and torch.ones(shape[-1:], dtype=weight)
            return kept(lambda x: F.rms_norm(x, shape[-1:], scale), shape, dtype=torch.float16)

    found = kept_of((10, 100))
    if weight == torch.float32:
        assert found > 2 * (2 * 1000)
    else:
        assert found == 2 * 1000 + 4 * 10


@pytest.mark.parametrize(
    "function",
    [
        lambda x, weight: F.rms_norm(x, (5,), weight),
        lambda x, weight: F.softmax(x * weight, -1) + F.log_softmax(x * weight, -1),
    ],
)
def test_a_rule_gives_the_same_values_and_gradients(function):
    x, weight = torch.randn(4, 5, requires_grad=True), torch.randn(5, requires_grad=True)
    results = []
    for context in (contextlib.nullcontext(), cuda_kernels(ANY_CARD)):
        with context:
            y = function(x, weight)
            results.append((y, *torch.autograd.grad(y.square().sum(), (x, weight))))
    torch.testing.assert_close(*results)


def test_rms_norm_peaks_as_published():
    """Liger-Kernel, benchmark/data/all_benchmark_data.csv, megatron_rms_norm of torch, H100."""
    hidden, published = 1024, 40.0224609375
    with SimulatedGPU("H100") as gpu:
        norm = nn.RMSNorm(hidden, eps=1e-6, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(4096, 1, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2):
            y = norm(x)
            y.sum().backward()
    assert gpu.footprint.peak_allocated == pytest.approx(published * MiB, rel=0.001)


# What has a kernel on CUDA and none on a CPU, by the beginning of its name; why it needs no rule.
ONLY_ON_CUDA = (
    "_fused_rms_norm",  # the rule “RMS norm”
    "_scaled_dot_product_",  # the rule “attention”
    "_flash_attention_",  # the rule “attention”
    "_efficient_attention_",  # the rule “attention”
    "_fill_mem_eff_dropout_mask_",  # for tests of that kernel
    "_cudnn_attention_",  # asked for by nobody before sm90, and there for nested tensors
    "_triton_",  # not called by PyTorch itself
    "_fused_dropout",  # the older name of native_dropout
    "_masked_scale",  # its backward
    "cudnn_",  # convolutions run as PyTorch's own, which SimulatedGPU says
    "_cudnn_",  # recurrent layers, CTC loss: as cudnn_
    "_use_cudnn_",  # as _cudnn_
    "_thnn_fused_",  # cells of recurrent layers run as PyTorch's own, which SimulatedGPU says
    "conv_depthwise3d",  # as cudnn_
    "_conv_depthwise2d",  # as cudnn_
    "miopen_",  # of AMD's builds
    "_use_miopen_",  # of AMD's builds
    "_cslt_",  # 2:4 sparsity, refused with sparse tensors
    "_sparse_semi_structured_",  # 2:4 sparsity
    "_to_sparse_semi_structured",  # 2:4 sparsity
    "_mixed_dtypes_linear",  # asked for by name only
    "_convert_weight_to_int4pack",  # asked for by name only
    "_weight_int4pack_mm",  # asked for by name only
    "_scaled_grouped_mm",  # asked for by name only
    "_scaled_addmm",  # asked for by name only
    "mm.dtype",  # asked for with out_dtype only
    "bmm.dtype",  # asked for with out_dtype only
    "addmm.dtype",  # asked for with out_dtype only
    "baddbmm.dtype",  # asked for with out_dtype only
    "batch_norm_",  # of SyncBatchNorm, whose ranks exchange them
    "_philox_",  # numbers of a generator
    "record_stream",  # memory of streams, which SimulatedGPU says
)


def test_every_operator_that_only_cuda_has_is_accounted_for():
    """By PyTorch's own table of kernels; a release with another one fails here."""
    table = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    found = set()
    for one in yaml.safe_load(table.read_text()):
        keys = {key.strip() for keys in one.get("dispatch", {}) for key in keys.split(",")}
        name = one["func"].partition("(")[0]
        explicit = any(key.startswith("CompositeExplicit") for key in keys)  # the same on both
        if "CUDA" in keys and "CPU" not in keys and not explicit:
            if "structured_delegate" not in one:
                found.add(name)
    unknown = [name for name in found if not name.startswith(ONLY_ON_CUDA)]
    assert len(found) > 50 and not unknown
    gone = {start for start in ONLY_ON_CUDA if not any(name.startswith(start) for name in found)}
    assert gone <= {"_philox_", "_scaled_addmm"}  # until 2.13, and since 2.15
