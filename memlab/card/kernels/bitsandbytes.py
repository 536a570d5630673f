"""bitsandbytes on the simulated GPU.

The first half reproduces what the kernels of bitsandbytes' CUDA backend allocate, and in which
order. The second half lets the library's parameter classes and its paged optimizers work on fake
tensors, which hold no data.

Known limitations: `Linear8bitLt` never finds outliers, because fake tensors have no values to
compare with the threshold. Pages that the driver moves for a paged optimizer are not followed.
"""

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
    """Whether bitsandbytes has been imported already.

    Nothing here may import it, because the import creates tensors, which would count as the GPU's.
    """
    return sys.modules.get("bitsandbytes") is not None


@contextlib.contextmanager
def _replaced_inside(replacements: dict):
    """Replace objects of the package, named by dotted paths, if it has been imported."""
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
    """Multiply by a 4-bit weight, which is dequantized as a whole unless there are few tokens.

    bitsandbytes/backends/cuda/ops.py, the kernel of `bitsandbytes::gemm_4bit` and
    `_dequant_linear_fallback`. A is [..., in features], shapeB is (out features, in features).
    """
    columns = A.size(-1)  # in features, K in the source
    rows = A.numel() // columns  # tokens, M in the source
    card = gpu.processors, *gpu.capability
    if columns % blocksize == 0 and fuses_4bit_product(card, A.dtype, rows, *shapeB):
        # The fused kernel reads the packed weight and allocates nothing but its result.
        return A.new_empty(*A.shape[:-1], shapeB[0])
    scales = absmax
    if absmax_8bit is not None:
        # Double quantization: the 8-bit scales are decoded to fp32, then shifted by their mean. The
        # name `unscaled` keeps the first tensor alive through the product, as `absmax_dq` does in
        # the source: 4 bytes per block of weights, twice.
        unscaled = torch.empty_like(absmax_8bit, dtype=torch.float32)
        scales = unscaled + absmax_offset
    dequantize = torch.ops.bitsandbytes.dequantize_4bit.default
    weight = dequantize(B, scales, blocksize, quant_type, shapeB, A.dtype)
    return torch.nn.functional.linear(A, weight, bias)


def fuses_4bit_product(card, dtype, rows, n, k) -> bool:
    """Whether bitsandbytes runs a product [rows, k] x [k, n] in its fused 4-bit kernel.

    The answer is bitsandbytes' own: `_gemm_4bit_use_custom_cuda` in bitsandbytes/backends/cuda/
    ops.py, a table of measured shapes for each generation of GPUs.

    card: (multiprocessors, major, minor) of the GPU, the numbers of the compute capability.
    """
    module = cuda_module()
    if rows > module._gemm_4bit_custom_max_m:
        return False
    # The table asks for the properties of a device by its index, and caches its answers by that
    # index. Every simulated GPU is device 0, so `__wrapped__` goes past the cache.
    with replaced((module, "_gpu_dispatch_props", lambda _: tuple(card))):
        return module._gemm_4bit_use_custom_cuda.__wrapped__(0, dtype, rows, n, k)


@functools.cache
def cuda_module():
    """Import bitsandbytes.backends.cuda.ops where its compiled CUDA library cannot be loaded."""
    extension = importlib.import_module("bitsandbytes.cextension")
    operators = importlib.import_module("bitsandbytes._ops")
    with (
        # The module looks up functions of the library at import. Its kernels would then call the
        # mock, so they must not reach the dispatcher.
        replaced((extension, "lib", mock.MagicMock())),
        replaced((operators, "register_kernel", lambda *names: lambda function: function)),
        replaced((torch._C, "_cuda_getCurrentRawStream", None), create=True),
        # A later import must not find this copy of the module.
        mock.patch.dict(sys.modules),
    ):
        sys.modules.pop("bitsandbytes.backends.cuda.ops", None)
        return importlib.import_module("bitsandbytes.backends.cuda.ops")


def quantize_4bit(A, blocksize, quant_type, quant_storage):
    """Quantize to 4 bits: the scales are allocated before the weights, unlike on a CPU.

    bitsandbytes/backends/cuda/ops.py, the kernel of `bitsandbytes::quantize_4bit`. The kernel of
    `bitsandbytes::quantize_blockwise`, below, has the same order; it quantizes the scales.
    """
    numbers = A.numel()
    absmax = A.new_empty(-(numbers // -blocksize), dtype=torch.float32)  # one for each block
    packed = (numbers + 1) // (quant_storage.itemsize * 2)  # two weights per byte
    return A.new_empty(packed, 1, dtype=quant_storage), absmax


def quantize_blockwise(A, code, blocksize):
    absmax = A.new_empty(-(A.numel() // -blocksize), dtype=torch.float32)
    return torch.empty_like(A, dtype=torch.uint8), absmax


def int8_vectorwise_quant(A, threshold=0.0):
    """Quantize each row to 8 bits with a scale of its own, and search for columns of outliers.

    bitsandbytes/backends/cuda/ops.py, the kernel of `bitsandbytes::int8_vectorwise_quant`. The
    search allocates its temporaries here as there, but finds nothing in tensors without data.
    """
    stats = A.new_empty(A.numel() // A.size(-1), dtype=torch.float32)  # the rows' scales
    rows = A.new_empty(A.shape, dtype=torch.int8)
    if not threshold:
        return rows, stats, None
    outliers = A.abs() >= threshold
    outliers.any()
    return rows, stats, A.new_empty(0, dtype=torch.int64)


def int8_mixed_scaled_mm(A, CA, CB, SCA, SCB, outlier_cols=None, bias=None):
    """Multiply in 8 bits; the part of the input that holds outliers is empty.

    bitsandbytes/backends/default/ops.py, the kernel of `bitsandbytes::int8_mixed_scaled_mm`.
    """
    product = torch.ops.bitsandbytes.int8_scaled_mm.default(CA, CB, SCA, SCB, bias, A.dtype)
    return product, A.new_empty(0)


def int8_scaled_mm(A, B, row_stats, col_stats, bias=None, dtype=None):
    """Multiply into int32, dequantize to fp16, then convert to the dtype that was asked for.

    bitsandbytes/backends/default/ops.py, the kernel of `bitsandbytes::int8_scaled_mm`, which calls
    `bitsandbytes::int8_mm_dequant` in bitsandbytes/backends/cuda/ops.py.
    """
    integers = torch.ops.bitsandbytes.int8_linear_matmul.default(A, B)  # 4 bytes per result
    out = torch.empty_like(integers, dtype=torch.float16)  # the only dtype the kernel writes
    if bias is not None and bias.dtype != torch.float16:
        out.add_(bias)  # the kernel adds an fp16 bias itself
    return out.to(dtype or torch.float16)


FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "4-bit numbers": (quantize_4bit, quantize_blockwise, gemm_4bit),
    "8-bit products": (int8_vectorwise_quant, int8_mixed_scaled_mm, int8_scaled_mm),
}
# `gemm_4bit` alone is given the GPU, because its choice of kernel depends on it.
KERNELS = [
    Kernel(rule, function.__name__, function, function is gemm_4bit, package="bitsandbytes")
    for rule, functions in FUNCTIONS.items()
    for function in functions
]


def int8_products():
    """Let 8-bit layers train in 8 bits on CPU tensors too.

    `matmul` in bitsandbytes/autograd/_functions.py computes in floating point there.
    """

    def matmul(A, B, out=None, state=None, threshold=0.0, bias=None):
        autograd = sys.modules["bitsandbytes.autograd._functions"]
        state = state or autograd.MatmulLtState()
        if threshold > 0.0:
            state.threshold = threshold
        return autograd.MatMul8bitLt.apply(A, B, out, bias, state)

    return _replaced_inside({"matmul": matmul})


# ---------------------------------------------------------------------- without data


@contextlib.contextmanager
def without_data(with_data):
    """Let bitsandbytes' quantized layers be built, moved and trained on fake tensors.

    `Params4bit` and `Int8Params` wrap a tensor in a subclass (`torch.Tensor._make_subclass`), which
    a fake tensor refuses. An ordinary parameter with the same attributes takes their place, and
    `quantize` and `moved` replace their `.to(device)`.

    with_data: wraps a function so that it runs on ordinary tensors. `create_dynamic_map` needs it,
        because it reads the table of 8-bit values that it builds.
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
        # The cache of that table: a fake table must not outlive the simulation.
        "functional.name2qmap": {},
    }
    with _replaced_inside(replacements):
        yield


def paged_states(zeros_on_host):
    """Let paged optimizers keep their states in paged memory, which they do on CUDA only.

    States of 100,000 elements and more are paged (`Optimizer8bit.get_state_buffer` in
    bitsandbytes/optim/optimizer.py). zeros_on_host: creates the tensor of such a state.
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
            # The manager keeps every paged tensor for the life of the process.
            "functional.GlobalPageManager._instance": None,
        }
    )


def is_to_be(parameter) -> bool:
    """Whether a parameter is a quantized weight of `without_data`, or becomes one on its move.

    8-bit weights that keep their half-precision values (`has_fp16_weights`) never do.
    """
    if getattr(parameter, "has_fp16_weights", False):
        return False
    return hasattr(parameter, "_memlab_quantizes_as")


def quantize(parameter, device) -> bool:
    """Quantize a weight of `without_data` onto a device, if its move there would.

    It would once: in `Params4bit.to` from any device, in `Int8Params.to` from the host. Returns
    False for a quantized weight and any other parameter, which are left as they are.
    """
    if not is_to_be(parameter):
        return False
    if hasattr(parameter, "bnb_quantized"):  # an attribute of Params4bit alone
        due = not parameter.bnb_quantized
    else:
        due = parameter.dtype != torch.int8 and parameter.device.type == "cpu"
    if due:
        parameter._memlab_quantizes_as._quantize(parameter, device)
    return due


def moved(parameter, data, device):
    """The parameter that bitsandbytes' `.to(device)` returns for a weight that is not due.

    `Params4bit.to` moves the constants in place, so they move for the old parameter too.
    `Int8Params.to` moves them for the new parameter alone. `Module._apply` takes over its data and
    nothing else, so an 8-bit layer keeps its `CB` and `SCB` where they were.

    data: the parameter's data on that device.
    """
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        state.to(device)
    new = parameter._memlab_quantizes_as(data, parameter.requires_grad, **vars(parameter))
    if state is None and data.dtype == torch.int8:
        new.CB = new.data
        new.SCB = None if new.SCB is None else new.SCB.to(device)
    return new


def pass_for_its_class(parameter) -> None:
    """Make a weight of `without_data` answer with bitsandbytes' class when asked for its type.

    peft, accelerate, trl and transformers ask, by the name of the type or by isinstance.
    """
    if hasattr(parameter, "_memlab_quantizes_as"):
        base: Any = type(parameter)
        set_type(parameter, _passing_for(parameter._memlab_quantizes_as, base))


@functools.cache
def _passing_for(kind, base):
    # isinstance(x, kind) looks at type(x) and then at x.__class__, so this property is enough.
    def __class__(self):
        return kind

    names = {
        "__class__": property(__class__),
        "__deepcopy__": _copy_whole,
        # accelerate rebuilds a parameter from its type and its __dict__.
        "__new__": lambda cls, *args, **kwargs: kind(*args, **kwargs),
    }
    return type(kind.__name__, (base,), names)


def set_type(tensor, kind) -> None:
    """Do `tensor.__class__ = kind`, even if a property hides the tensor's real class."""
    object.__dict__["__class__"].__set__(tensor, kind)


def _copy_whole(self, memo):
    """Deep-copy the parameter with its quantization attributes, as bitsandbytes' classes do."""
    if id(self) not in memo:
        clone: Any = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = clone
        for name in self.__dict__.keys() - clone.__dict__.keys():
            value = self.__dict__[name]
            if name == "CB" and value is not None:
                clone.CB = clone.data  # the same storage as the data: a copy would count twice
            else:
                setattr(clone, name, value if name == "module" else copy.deepcopy(value, memo))
        pass_for_its_class(clone)
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
    """Create an ordinary parameter that has the attributes of a bitsandbytes class."""
    data = torch.empty(0) if data is None else data.detach()
    parameter: Any = torch.nn.Parameter(data, requires_grad)
    vars(parameter).update(attributes, _memlab_quantizes_as=cls)
    pass_for_its_class(parameter)
    return parameter


def _from_prequantized(cls, data, quantized_stats, requires_grad=False, device="cuda", module=None):
    """`Params4bit.from_prequantized`: a weight of a checkpoint that is already quantized."""
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
    pass_for_its_class(parameter)
    return parameter


def _int8_params(
    cls, data=None, requires_grad=True, has_fp16_weights=False, CB=None, SCB=None, **_
):
    return _parameter(cls, data, requires_grad, has_fp16_weights=has_fp16_weights, CB=CB, SCB=SCB)
