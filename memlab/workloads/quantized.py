"""Frozen 4-bit and 8-bit base models for LoRA (QLoRA), quantized by bitsandbytes.

The module chooses the linear layers that transformers would quantize, replaces them by
bitsandbytes' layers, and loads the weights in the order of `from_pretrained`. The order matters
because it decides what the caching allocator keeps reserved. Known limitation: the experts of a
mixture arrive merged (see `load`).
"""

import importlib
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from memlab.libraries import import_bitsandbytes
from memlab.spec.recipe import COMPUTED_IN, Recipe
from memlab.spec.serving import Workload

COMPUTE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Names of classification heads, which peft trains along with the adapters:
# `PeftModelForSequenceClassification` in peft/peft_model.py.
HEADS = ("classifier", "score")


def quantize_base(model: Any, recipe: Workload, storage: torch.dtype = torch.uint8) -> None:
    """Replace the model's linear layers by bitsandbytes' 4-bit or 8-bit layers, in place.

    storage: the dtype in which packed 4-bit weights are stored (`bnb_4bit_quant_storage`).

    This quantizes nothing yet. `load` quantizes the weights, or a later move of the model to a
    device does, which is bitsandbytes' own behaviour.
    """
    bitsandbytes = import_bitsandbytes(f"base {recipe.base}")
    for name, module in to_be_quantized(model).items():
        model.set_submodule(name, _quantized_linear(bitsandbytes, module, recipe, storage))
    model.is_loaded_in_8bit = recipe.base == "int8"  # peft reads these two flags
    model.is_loaded_in_4bit = not model.is_loaded_in_8bit


def load(model: Any, device: torch.device | str) -> None:
    """Move a base model to its device as `from_pretrained` does, quantizing it on the way.

    The weights arrive one by one, sorted by name with numbers in numerical order
    (`convert_and_load_state_dict_in_model` in transformers/core_model_loading.py). Each arrives in
    its unquantized dtype, and that copy lives until the quantized weight exists. The next weight
    can then reuse the freed block. The order therefore decides which blocks are left over, and so
    how much stays reserved. The first releases of transformers 5 loaded weights in several threads,
    in another order each time. The block that `from_pretrained` allocates before all weights is
    not part of this function (`memlab.predict.recipe_log.warm_up_bytes`).

    Known limitation: some checkpoints store experts one by one, and `from_pretrained` merges them
    on the device. Here they arrive merged.
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
        # `quantize.convert` expects a checkpoint's orientation and transposes a Conv1D's weight.
        # `_quantized_linear` has already transposed it, so undo that here.
        weight: Any = parameter.data.T if layer.source_cls is Conv1D else parameter.data
        weight = weight.to(device)
        layer.weight = quantize.convert({name: weight}, model=model)[name]
        del weight  # free the unquantized copy before the next weight arrives
    model.to(device)  # only the buffers are left to move


def to_be_quantized(model: Any) -> dict[str, Any]:
    """Name -> linear layer that bitsandbytes replaces.

    Transformers leaves some modules unquantized: a language model's head, tied weights, and modules
    that a family keeps in fp32 (T5's `wo`). It also skips subclasses of `nn.Linear` such as
    routers, and experts stored as one three-dimensional tensor. A classification head stays
    unquantized too, because it is trained; `llm_int8_skip_modules` has the same effect.
    """
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    skipped = [*get_keys_to_not_convert(model), *HEADS]
    skipped += model._keep_in_fp32_modules or ()
    return {
        name: module
        for name, module in model.named_modules()
        # Not `isinstance`: a subclass of Linear may compute something else.
        if (type(module) is torch.nn.Linear or isinstance(module, Conv1D))
        and should_convert_module(name, skipped)
    }


def _quantized_linear(
    bitsandbytes: Any, module: Any, recipe: Workload, storage: torch.dtype
) -> Any:
    weight = module.weight.data
    if isinstance(module, Conv1D):
        weight = weight.T  # [out, in]; a view, which quantization copies (see `load`)
    # The layer is created with sizes (1, 1): its own weight is replaced at once.
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
    layer.source_cls = type(module)  # transformers' quantizers read this attribute
    layer.out_features, layer.in_features = weight.shape
    return layer


def leave_in_fp32(model: Any, recipe: Recipe) -> None:
    """Cast the modules of an fp16 base that must be in fp32 to fp32, in place.

    These are the modules that `from_pretrained` keeps in fp32, such as T5's `wo`. With loss scaling
    a classification head is one of them too: it is trained, and `torch.amp.GradScaler` refuses
    gradients in fp16. A base in another format is left as it is.
    """
    held = recipe.compute_dtype or COMPUTED_IN[recipe.precision]
    # transformers applies `_keep_in_fp32_modules` to fp16 only (`PreTrainedModel`).
    if held != "fp16":
        return
    in_fp32 = set(model._keep_in_fp32_modules or ())
    in_fp32 |= set(HEADS) if recipe.precision == "fp16-amp" else set()
    for name, module in model.named_modules():
        if name.split(".")[-1] in in_fp32:
            module.float()


def cast_the_rest(model: torch.nn.Module) -> None:
    """Freeze all parameters and cast those that are not quantized to fp32.

    peft's `prepare_model_for_kbit_training` does the same before adapters are added. It recognises
    quantized weights by their dtype or class, so it knows only those that are already quantized.
    """
    # By layer: a sharded model is quantized when it moves, so here its weights still have 16 bits.
    quantized = {id(layer.weight) for layer in quantized_layers(model)}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        half = parameter.dtype in (torch.float16, torch.bfloat16)
        if half and id(parameter) not in quantized:
            parameter.data = parameter.data.float()


def quantized_layers(model: torch.nn.Module) -> list[Any]:
    """The bitsandbytes layers: their weights are quantized, or will be when they move."""
    nn = importlib.import_module("bitsandbytes.nn")
    kinds = nn.Linear4bit, nn.Linear8bitLt
    return [module for module in model.modules() if isinstance(module, kinds)]
