"""Frozen 4-bit and 8-bit bases for LoRA (QLoRA), by bitsandbytes, real and without data."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import warnings
from unittest import mock

import torch
from transformers.pytorch_utils import Conv1D

from memlab.recipe import Recipe

COMPUTE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def import_bitsandbytes(wanted_by: str):
    """The package bitsandbytes, or a ValueError that says what needs it."""
    # It warns of an optional kernel for 4-bit products on CPUs.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # And at every step that 8-bit layers compute in fp16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    try:
        return importlib.import_module("bitsandbytes")
    except ImportError:
        raise ValueError(
            f"{wanted_by} needs the package bitsandbytes, which is not here: pip install it"
        ) from None


def quantize_base(model: torch.nn.Module, recipe: Recipe) -> None:
    """Replace the linear layers by bitsandbytes' 4-bit or 8-bit ones, in place.

    Their weights are quantized when the model is moved to its device, as bitsandbytes does. What
    transformers leaves alone stays as it is: the head of a language model and tied weights; so
    does a classifier, as with `llm_int8_skip_modules`, because it is trained.
    """
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    bitsandbytes = import_bitsandbytes(f"base {recipe.base}")
    kept = [*get_keys_to_not_convert(model), "classifier", "score"]
    for name, module in list(model.named_modules()):
        if isinstance(module, (torch.nn.Linear, Conv1D)) and should_convert_module(name, kept):
            model.set_submodule(name, _quantized_linear(bitsandbytes, module, recipe))
    model.is_loaded_in_8bit = recipe.base == "int8"  # as from_pretrained tells peft
    model.is_loaded_in_4bit = not model.is_loaded_in_8bit


def _quantized_linear(bitsandbytes, module, recipe: Recipe):
    weight = module.weight.data
    if isinstance(module, Conv1D):
        weight = weight.T.contiguous()
    # Made tiny, because its own weight is thrown away.
    if recipe.base == "int8":
        layer = bitsandbytes.nn.Linear8bitLt(1, 1, has_fp16_weights=False, threshold=6.0)
        layer.weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False)
    else:
        layer = bitsandbytes.nn.Linear4bit(1, 1, compute_dtype=COMPUTE_DTYPES[recipe.compute_dtype])
        layer.weight = bitsandbytes.nn.Params4bit(
            weight,
            requires_grad=False,
            blocksize=recipe.block_size,
            compress_statistics=recipe.double_quant,
            quant_type=recipe.base,
            module=layer,
        )
    layer.bias = module.bias
    layer.source_cls = type(module)  # as transformers notes it
    layer.out_features, layer.in_features = weight.shape
    return layer


def cast_the_rest(model: torch.nn.Module) -> None:
    """Cast what is not quantized to fp32, as peft does before it adds adapters."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # peft asks by a name that transformers drops
        peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def numel(parameter: torch.nn.Parameter) -> int:
    """The weights a parameter stands for: two in each byte of a 4-bit one."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


def constants(parameter: torch.nn.Parameter) -> list[torch.Tensor]:
    """The tensors beside a quantized weight that it cannot be read without.

    4 bits: the largest value of each block, itself in 8 bits with double quantization, and the
    tables of codes. 8 bits: the largest value of each row.
    """
    found, state = [], getattr(parameter, "quant_state", None)
    while state is not None:
        found += [state.absmax, state.code, state.offset]
        state = state.state2
    found.append(getattr(parameter, "SCB", None))
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def constants_of_layers(model: torch.nn.Module) -> list[torch.Tensor]:
    """The constants that 8-bit layers have taken over from their weights, as their first product
    does."""
    states = [getattr(module, "state", None) for module in model.modules()]
    found = [getattr(state, "SCB", None) for state in states]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


# ---------------------------------------------------------------------- without data


@contextlib.contextmanager
def weights_without_data():
    """Let bitsandbytes' quantized layers be built, moved and trained on fake tensors.

    Its parameter classes wrap a tensor in a subclass, which a fake tensor refuses; an ordinary
    parameter with the same attributes serves, and `quantized` stands for its `.to(device)`.
    """
    if "bitsandbytes" not in sys.modules:
        yield
        return
    bitsandbytes = sys.modules["bitsandbytes"]
    with contextlib.ExitStack() as stack:
        for target, name, replacement in (
            (bitsandbytes.nn.Params4bit, "__new__", _params4bit),
            (bitsandbytes.nn.Int8Params, "__new__", _int8_params),
            (bitsandbytes.nn.modules, "has_avx512bf16", lambda: False),
        ):
            stack.enter_context(mock.patch.object(target, name, replacement))
        yield


@contextlib.contextmanager
def int8_products_of_cuda():
    """Let 8-bit layers multiply 8-bit numbers on cpu tensors, which they do on CUDA only."""
    if "bitsandbytes" not in sys.modules:
        yield
        return
    autograd = sys.modules["bitsandbytes.autograd._functions"]

    def matmul(A, B, out=None, state=None, threshold=0.0, bias=None):
        return autograd.MatMul8bitLt.apply(A, B, out, bias, state)

    with mock.patch.object(sys.modules["bitsandbytes"], "matmul", matmul):
        yield


def is_to_be(parameter) -> bool:
    """Whether a parameter of `weights_without_data` is one that is quantized, now or later."""
    return hasattr(parameter, "_memlab_quantizes_as")


def source_dtype(parameter) -> torch.dtype:
    """In which it comes to the card; Int8Params converts it on the way, as `_quantize` says."""
    converted = hasattr(parameter, "SCB") and parameter.is_floating_point()
    return torch.float16 if converted else parameter.dtype


def quantized(parameter, device) -> bool:
    """Quantize a parameter of `weights_without_data` that is not yet; whether it was one."""
    if not is_to_be(parameter):
        return False
    if parameter.data.dtype not in (torch.uint8, torch.int8):
        parameter._memlab_quantizes_as._quantize(parameter, device)
    return True


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
    parameter = torch.nn.Parameter(torch.empty(0) if data is None else data, requires_grad)
    parameter._memlab_quantizes_as = cls
    parameter.blocksize, parameter.quant_type = blocksize or 64, quant_type
    parameter.compress_statistics, parameter.quant_storage = compress_statistics, quant_storage
    parameter.quant_state, parameter.bnb_quantized = quant_state, bnb_quantized
    parameter.module = module
    return parameter


def _int8_params(
    cls, data=None, requires_grad=True, has_fp16_weights=False, CB=None, SCB=None, **_
):
    parameter = torch.nn.Parameter(torch.empty(0) if data is None else data, requires_grad)
    parameter._memlab_quantizes_as = cls
    parameter.has_fp16_weights, parameter.CB, parameter.SCB = has_fp16_weights, CB, SCB
    return parameter
