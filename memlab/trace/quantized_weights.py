"""The size of bitsandbytes' quantized weights, and the tensors that belong to them."""

import torch


def numel(parameter: torch.nn.Parameter) -> int:
    """The number of weights in a parameter; a 4-bit one holds two weights per byte."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


def constants(parameter: torch.nn.Parameter) -> list[torch.Tensor]:
    """The tensors that are needed to dequantize a weight of bitsandbytes.

    4 bits: the absolute maximum of each block, and a table of codes. With double quantization, the
    maxima are stored as 8-bit codes, and have maxima, a table and an offset of their own. 8 bits:
    the absolute maximum of each row (`SCB`).
    """
    tensors, state = [], getattr(parameter, "quant_state", None)
    # `QuantState` (bitsandbytes/functional.py): `state2` holds the quantization of `absmax`.
    while state is not None:
        tensors += [state.absmax, state.code, state.offset]
        state = state.state2
    tensors.append(getattr(parameter, "SCB", None))
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]


def constants_of_layers(model: torch.nn.Module) -> list[torch.Tensor]:
    """The row maxima of 8-bit layers that have run, which keep them in `layer.state`.

    The first forward pass moves them there from the weight: `Linear8bitLt.init_8bit_state` in
    bitsandbytes/nn/modules.py.
    """
    states = [getattr(module, "state", None) for module in model.modules()]
    scales = [getattr(state, "SCB", None) for state in states]
    return [tensor for tensor in scales if isinstance(tensor, torch.Tensor)]
