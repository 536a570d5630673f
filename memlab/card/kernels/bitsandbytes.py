"""bitsandbytes on the simulated card: its CUDA kernels, its layers and states without data."""

import contextlib
import copy
import functools
import importlib
import sys
from typing import Any
from unittest import mock

import torch

from memlab.card.kernels.saved_tensors import Kernel
from memlab.trace.patches import replaced


def is_imported() -> bool:
    """Whether the package is in use; it makes tensors when it is imported, so never inside."""
    return sys.modules.get("bitsandbytes") is not None


@contextlib.contextmanager
def _replaced_inside(replacements: dict):
    """Names inside the package stand for other objects, if it is in use."""
    rows = []
    for path, replacement in replacements.items() if is_imported() else ():
        *parts, name = path.split(".")
        target = functools.reduce(getattr, parts, sys.modules["bitsandbytes"])
        rows.append((target, name, replacement))
    with replaced(*rows):
        yield


# ---------------------------------------------------------------------- kernels


def gemm_4bit(
    gpu,
    A,
    B,
    shapeB,
    absmax,
    blocksize,
    quant_type,
    bias=None,
    absmax_8bit=None,
    absmax_code=None,
    absmax_offset=None,
):
    """A product with a 4-bit weight writes the whole weight out first, except for few tokens.

    bitsandbytes/backends/cuda/ops.py: `_dequant_linear_fallback`, or the fused kernel.
    """
    columns = A.size(-1)
    rows = A.numel() // columns
    card = gpu.processors, *gpu.capability
    if columns % blocksize == 0 and fuses_4bit_product(card, A.dtype, rows, *shapeB):
        return A.new_empty(*A.shape[:-1], shapeB[0])
    scales = absmax
    if absmax_8bit is not None:
        unscaled = torch.empty_like(absmax_8bit, dtype=torch.float32)  # stays to the end, as there
        scales = unscaled + absmax_offset
    dequantize = torch.ops.bitsandbytes.dequantize_4bit.default
    weight = dequantize(B, scales, blocksize, quant_type, shapeB, A.dtype)
    return torch.nn.functional.linear(A, weight, bias)


def fuses_4bit_product(card, dtype, rows, n, k) -> bool:
    """bitsandbytes' own rule, a table of measured cases.

    card: (multiprocessors, compute capability's two numbers).
    """
    module = cuda_module()
    if rows > module._gemm_4bit_custom_max_m:
        return False
    with replaced((module, "_gpu_dispatch_props", lambda _: tuple(card))):
        return module._gemm_4bit_use_custom_cuda.__wrapped__(0, dtype, rows, n, k)


@functools.cache
def cuda_module():
    """bitsandbytes.backends.cuda.ops, which looks for CUDA's library while it is imported."""
    extension = importlib.import_module("bitsandbytes.cextension")
    operators = importlib.import_module("bitsandbytes._ops")
    with (
        replaced((extension, "lib", mock.MagicMock())),
        replaced((operators, "register_kernel", lambda *names: lambda function: function)),
        replaced((torch._C, "_cuda_getCurrentRawStream", None), create=True),
        mock.patch.dict(sys.modules),
    ):
        sys.modules.pop("bitsandbytes.backends.cuda.ops", None)
        return importlib.import_module("bitsandbytes.backends.cuda.ops")


def quantize_4bit(A, blocksize, quant_type, quant_storage):
    """The scales take their memory before the weights do, the other way round than on a CPU.

    bitsandbytes/backends/cuda/ops.py, as the next one, for the scales of the scales.
    """
    numbers = A.numel()
    absmax = A.new_empty(-(numbers // -blocksize), dtype=torch.float32)
    packed = (numbers + 1) // (quant_storage.itemsize * 2)
    return A.new_empty(packed, 1, dtype=quant_storage), absmax


def quantize_blockwise(A, code, blocksize):
    absmax = A.new_empty(-(A.numel() // -blocksize), dtype=torch.float32)
    return torch.empty_like(A, dtype=torch.uint8), absmax


def int8_vectorwise_quant(A, threshold=0.0):
    """Rows in 8 bits, and a search for outliers, which tensors without data do not have.

    bitsandbytes/backends/cuda/ops.py, as the two below.
    """
    stats = A.new_empty(A.numel() // A.size(-1), dtype=torch.float32)
    rows = A.new_empty(A.shape, dtype=torch.int8)
    if not threshold:
        return rows, stats, None
    outliers = A.abs() >= threshold
    outliers.any()
    return rows, stats, A.new_empty(0, dtype=torch.int64)


def int8_mixed_scaled_mm(A, CA, CB, SCA, SCB, outlier_cols=None, bias=None):
    """The product in 8 bits, and an empty one of the outliers."""
    product = torch.ops.bitsandbytes.int8_scaled_mm.default(CA, CB, SCA, SCB, bias, A.dtype)
    return product, A.new_empty(0)


def int8_scaled_mm(A, B, row_stats, col_stats, bias=None, dtype=None):
    """An int32 product, then fp16, then the dtype that was asked for."""
    integers = torch.ops.bitsandbytes.int8_linear_matmul.default(A, B)
    out = torch.empty_like(integers, dtype=torch.float16)
    if bias is not None and bias.dtype != torch.float16:
        out.add_(bias)
    return out.to(dtype or torch.float16)


FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "4-bit numbers": (quantize_4bit, quantize_blockwise, gemm_4bit),
    "8-bit products": (int8_vectorwise_quant, int8_mixed_scaled_mm, int8_scaled_mm),
}
KERNELS = [
    Kernel(rule, function.__name__, function, function is gemm_4bit, package="bitsandbytes")
    for rule, functions in FUNCTIONS.items()
    for function in functions
]


def int8_products():
    """Let 8-bit layers multiply 8-bit numbers on cpu tensors, which they do on CUDA only."""

    def matmul(A, B, out=None, state=None, threshold=0.0, bias=None):
        autograd = sys.modules["bitsandbytes.autograd._functions"]
        return autograd.MatMul8bitLt.apply(A, B, out, bias, state)

    return _replaced_inside({"matmul": matmul})


# ---------------------------------------------------------------------- without data


@contextlib.contextmanager
def without_data(with_data):
    """Let the package's quantized layers be built, moved and trained on fake tensors.

    Its parameter classes wrap a tensor in a subclass, which a fake tensor refuses; an ordinary
    parameter with the same attributes serves, and `quantize` stands for its `.to(device)`. It reads
    the table of its 8-bit numbers while it makes it: with_data(function) lets it.
    """

    def create_dynamic_map(*args, **kwargs):
        return with_data(original)(*args, **kwargs)

    original = is_imported() and sys.modules["bitsandbytes.functional"].create_dynamic_map
    replacements = {
        "nn.Params4bit.__new__": _params4bit,
        "nn.Params4bit.from_prequantized": classmethod(_from_prequantized),
        "nn.Int8Params.__new__": _int8_params,
        "nn.modules.has_avx512bf16": lambda: False,
        "functional.create_dynamic_map": create_dynamic_map,
        "functional.name2qmap": {},  # its cache
    }
    with _replaced_inside(replacements):
        yield


def paged_states(zeros_on_host):
    """Let paged optimizers page, which they do on CUDA only.

    zeros_on_host: makes each state that is paged, those of 100,000 elements and more
    (`Optimizer8bit.get_state_buffer` in bitsandbytes/optim/optimizer.py).
    """

    def get_paged(*shape, dtype=torch.float32, device=None):
        paged = zeros_on_host(shape, dtype, device)
        paged.is_paged = True
        return paged

    return _replaced_inside(
        {
            "functional.get_paged": get_paged,
            "functional.fill": lambda *args, **kwargs: None,
            "functional.prefetch_tensor": lambda *args, **kwargs: None,
            "functional.GlobalPageManager._instance": None,  # it would keep what it has paged
        }
    )


def is_to_be(parameter) -> bool:
    """Whether a parameter of `without_data` is one that is quantized, now or later."""
    if getattr(parameter, "has_fp16_weights", False):
        return False
    return hasattr(parameter, "_memlab_quantizes_as")


def quantize(parameter, device) -> bool:
    """Quantize a parameter of `without_data` that is not yet; whether it was one."""
    if not is_to_be(parameter):
        return False
    done = (
        parameter.bnb_quantized if hasattr(parameter, "bnb_quantized") else parameter.CB is not None
    )
    if not done:
        parameter._memlab_quantizes_as._quantize(parameter, device)
        _pass_for_its_class(parameter)
    return True


def _pass_for_its_class(parameter) -> None:
    """Let libraries that ask a parameter for its class, or its type, hear bitsandbytes' one.

    peft, accelerate, trl and transformers do, by its name or by isinstance.
    """
    base: Any = type(parameter)
    set_type(parameter, _passing_for(parameter._memlab_quantizes_as, base))


@functools.cache
def _passing_for(kind, base):
    def __class__(self):
        return kind

    names = {
        "__class__": property(__class__),
        "__deepcopy__": _copy_whole,
        # accelerate makes a parameter anew by its type and what is in its __dict__.
        "__new__": lambda cls, *args, **kwargs: kind(*args, **kwargs),
    }
    return type(kind.__name__, (base,), names)


def set_type(tensor, kind) -> None:
    """`tensor.__class__ = kind`, also where it says that it has another."""
    object.__dict__["__class__"].__set__(tensor, kind)


def _copy_whole(self, memo):
    """As bitsandbytes' classes copy themselves: with what belongs to the numbers."""
    if id(self) not in memo:
        clone: Any = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = clone
        for name in self.__dict__.keys() - clone.__dict__.keys():
            value = self.__dict__[name]
            if name == "CB" and value is not None:  # the numbers themselves
                clone.CB = clone.data
            else:
                setattr(clone, name, value if name == "module" else copy.deepcopy(value, memo))
        _pass_for_its_class(clone)
    return memo[id(self)]


def _params4bit(
    cls,
    data=None,
    requires_grad=False,
    quant_state=None,
    blocksize=None,
    compress_statistics=True,
    quant_type="fp4",
    quant_storage=torch.uint8,
    module=None,
    bnb_quantized=False,
    **kwargs,
):
    return _parameter(
        cls,
        data,
        requires_grad,
        quant_state=quant_state,
        blocksize=blocksize or 64,
        compress_statistics=compress_statistics,
        quant_type=quant_type,
        quant_storage=quant_storage,
        module=module,
        bnb_quantized=bnb_quantized,
    )


def _parameter(cls, data, requires_grad, **attributes):
    """An ordinary parameter with the attributes of one of these classes, which it passes for."""
    data = torch.empty(0) if data is None else data.detach()  # of any class
    parameter: Any = torch.nn.Parameter(data, requires_grad)
    vars(parameter).update(attributes, _memlab_quantizes_as=cls)
    _pass_for_its_class(parameter)
    return parameter


def _from_prequantized(cls, data, quantized_stats, requires_grad=False, device="cuda", module=None):
    """A weight of a checkpoint that holds quantized ones."""
    state = sys.modules["bitsandbytes.functional"].QuantState.from_dict(quantized_stats, device)
    parameter = cls(
        data.to(device),
        requires_grad,
        quant_state=state,
        blocksize=state.blocksize,
        compress_statistics=state.nested,
        quant_type=state.quant_type,
        quant_storage=data.dtype,
        module=module,
        bnb_quantized=True,
    )
    if module is not None:
        module.quant_state = state
    _pass_for_its_class(parameter)
    return parameter


def _int8_params(
    cls, data=None, requires_grad=True, has_fp16_weights=False, CB=None, SCB=None, **_
):
    return _parameter(cls, data, requires_grad, has_fp16_weights=has_fp16_weights, CB=CB, SCB=SCB)
