"""The registry of all rules by which kernels on the simulated GPU differ from CPU kernels."""

import contextlib
import functools

import torch

from memlab.card.kernels import bitsandbytes, saved_tensors, sdpa
from memlab.gpus import GPU
from memlab.trace.patches import dispatched

# The name of each rule -> the source that it was read from. The book's page on accuracy shows what
# each rule changes.
RULES = {
    "dropout": "PyTorch, aten/src/ATen/native/Dropout.cpp",
    "softmax to fp32": "PyTorch, aten/src/ATen/native/SoftMax.cpp",
    "RMS norm": "PyTorch, aten/src/ATen/native/layer_norm.cpp",
    "attention": "PyTorch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp",
    "autocast": "PyTorch, aten/src/ATen/autocast_mode.h",
    "4-bit numbers": "bitsandbytes, bitsandbytes/backends/cuda/ops.py",
    "8-bit products": "bitsandbytes, bitsandbytes/backends/cuda/ops.py",
    "scratch of kernels": "PyTorch, aten/src/ATen/native: cuda/SoftMax.cu and "
    "transformers/cuda/attention_backward.cu",
    "sums of rows": "PyTorch, aten/src/ATen/native/cuda/Reduce.cuh",
    "paged states": "bitsandbytes, bitsandbytes/optim/optimizer.py",
}
KERNELS = [*saved_tensors.KERNELS, *sdpa.KERNELS, *bitsandbytes.KERNELS]


@contextlib.contextmanager
def cuda_kernels(gpu: GPU, rules=frozenset(RULES)):
    """Let operators on CPU tensors run as their CUDA kernels do.

    gpu: the GPU whose choices count where GPUs choose different kernels.
    rules: the names of the rules that hold.

    NB: this function installs dispatcher kernels only. The rules for scratch, sums of rows and
    paged states are read where that memory is allocated (`memlab.card.kernels.taken`).
    """
    rows = []
    for kernel in KERNELS:
        if kernel.rule in rules and (kernel.package == "aten" or bitsandbytes.is_imported()):
            function = kernel.function
            function = functools.partial(function, gpu) if kernel.of_card else function
            rows.append((kernel.package, kernel.operator, function, kernel.key))
    if "autocast" in rules:
        # A fallthrough takes the CPU's autocast kernel out of the way.
        for operator in saved_tensors.autocast_of_cpu_only():
            rows.append(("aten", operator, torch.library.fallthrough_kernel, "AutocastCPU"))
    products = bitsandbytes.int8_products if "8-bit products" in rules else contextlib.nullcontext
    with dispatched(rows), products():
        yield
