"""Frozen 4-bit and 8-bit bases for LoRA (QLoRA), by bitsandbytes."""

import importlib
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from memlab.libraries import import_bitsandbytes
from memlab.spec.recipe import COMPUTED_IN, Recipe
from memlab.spec.serving import Workload

COMPUTE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
HEADS = ("classifier", "score")  # of a classifier, by the names that peft trains them under


def quantize_base(model: Any, recipe: Workload, storage: torch.dtype = torch.uint8) -> None:
    """Replace the linear layers by bitsandbytes' 4-bit or 8-bit ones, in place.

    storage: the dtype that 4-bit weights are said to have (`bnb_4bit_quant_storage`).

    Their weights are quantized by `load`, or when the model is moved, as bitsandbytes does.
    """
    bitsandbytes = import_bitsandbytes(f"base {recipe.base}")
    for name, module in to_be_quantized(model).items():
        model.set_submodule(name, _quantized_linear(bitsandbytes, module, recipe, storage))
    model.is_loaded_in_8bit = recipe.base == "int8"  # as from_pretrained tells peft
    model.is_loaded_in_4bit = not model.is_loaded_in_8bit


def load(model: Any, device: torch.device | str) -> None:
    """Bring a base to its device as `from_pretrained` does, and quantize it on the way.

    Weight after weight comes in its first dtype, in the natural order of names, and is there until
    the quantized one is: `convert_and_load_state_dict_in_model` in core_model_loading.py of
    transformers. Its blocks are free for the next one. The order decides which of them are left
    over, and so what stays reserved; the first releases of transformers 5 loaded by threads, in
    another order each time. What `from_pretrained` takes before is `warm_up_bytes`.

    Known limitation: experts that a checkpoint has one by one, which `from_pretrained` merges on
    the device, come merged.
    """
    from transformers.core_model_loading import dot_natural_key
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize, Bnb8bitQuantize

    quantize = (Bnb4bitQuantize if model.is_loaded_in_4bit else Bnb8bitQuantize)(None)
    weights = {id(layer.weight): layer for layer in quantized_layers(model)}
    for name in sorted((name for name, _ in model.named_parameters()), key=dot_natural_key):
        parameter = model.get_parameter(name)
        layer = weights.get(id(parameter))
        if layer is None:
            parameter.data = parameter.data.to(device)
            continue
        # As a file has it, whose weight a Conv1D turns round.
        weight: Any = parameter.data.T if layer.source_cls is Conv1D else parameter.data
        weight = weight.to(device)
        layer.weight = quantize.convert({name: weight}, model=model)[name]
        del weight  # before the next one comes
    model.to(device)  # its buffers


def to_be_quantized(model: Any) -> dict[str, Any]:
    """The linear layers of a base that bitsandbytes replaces, by name.

    What transformers leaves alone stays as it is: the head of a language model, tied weights,
    what a family keeps in fp32 (T5's `wo`), subclasses of `nn.Linear` such as routers, and experts
    that are one tensor of three dimensions; so does a classifier, as with `llm_int8_skip_modules`,
    because it is trained.
    """
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    skipped = [*get_keys_to_not_convert(model), *HEADS]
    skipped += model._keep_in_fp32_modules or ()
    return {
        name: module
        for name, module in model.named_modules()
        # A subclass may compute otherwise, so transformers leaves it alone.
        if (type(module) is torch.nn.Linear or isinstance(module, Conv1D))
        and should_convert_module(name, skipped)
    }


def _quantized_linear(
    bitsandbytes: Any, module: Any, recipe: Workload, storage: torch.dtype
) -> Any:
    weight = module.weight.data
    if isinstance(module, Conv1D):
        weight = weight.T  # a view: what quantizes it makes a copy, as in `load`
    # Made tiny, because its own weight is thrown away.
    if recipe.base == "int8":
        layer = bitsandbytes.nn.Linear8bitLt(1, 1, has_fp16_weights=False, threshold=6.0)
        layer.weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False)
    else:
        compute = COMPUTE_DTYPES[recipe.compute_dtype or COMPUTED_IN[recipe.precision]]
        layer = bitsandbytes.nn.Linear4bit(1, 1, compute_dtype=compute, quant_storage=storage)
        layer.weight = bitsandbytes.nn.Params4bit(
            weight,
            requires_grad=False,
            compress_statistics=recipe.double_quant,
            quant_type=recipe.base,
            quant_storage=storage,
            module=layer,
        )
    layer.bias = module.bias
    layer.source_cls = type(module)  # as transformers notes it
    layer.out_features, layer.in_features = weight.shape
    return layer


def leave_in_fp32(model: Any, recipe: Recipe) -> None:
    """Cast what is in fp32 beside a base in fp16 whose rest is not, in place.

    What from_pretrained leaves so, such as T5's `wo`; and a head, which is trained, where the loss
    is scaled: PyTorch's scaler refuses gradients in fp16.
    """
    held = recipe.compute_dtype or COMPUTED_IN[recipe.precision]
    if held != "fp16":
        return
    in_fp32 = set(model._keep_in_fp32_modules or ())
    in_fp32 |= set(HEADS) if recipe.precision == "fp16-amp" else set()
    for name, module in model.named_modules():
        if name.split(".")[-1] in in_fp32:
            module.float()


def cast_the_rest(model: torch.nn.Module) -> None:
    """Freeze everything and cast what is not quantized to fp32.

    As peft's `prepare_model_for_kbit_training` does before adapters are added, which knows
    quantized weights by their dtype or class, and so only those that are quantized already.
    """
    quantized = {id(layer.weight) for layer in quantized_layers(model)}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        half = parameter.dtype in (torch.float16, torch.bfloat16)
        if half and id(parameter) not in quantized:
            parameter.data = parameter.data.float()


def quantized_layers(model: torch.nn.Module) -> list[Any]:
    """The layers whose weights are quantized, or are to be when they move."""
    nn = importlib.import_module("bitsandbytes.nn")
    kinds = nn.Linear4bit, nn.Linear8bitLt
    return [module for module in model.modules() if isinstance(module, kinds)]
