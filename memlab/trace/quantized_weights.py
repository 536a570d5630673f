"""What a quantized weight of bitsandbytes stands for, and the tensors beside it."""

import torch


def numel(parameter: torch.nn.Parameter) -> int:
    """The weights a parameter stands for: two in each byte of a 4-bit one."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


def constants(parameter: torch.nn.Parameter) -> list[torch.Tensor]:
    """The tensors beside a quantized weight that it cannot be read without.

    4 bits: the largest value of each block, itself in 8 bits with double quantization, and the
    tables of codes. 8 bits: the largest value of each row.
    """
    tensors, state = [], getattr(parameter, "quant_state", None)
    while state is not None:
        tensors += [state.absmax, state.code, state.offset]
        state = state.state2
    tensors.append(getattr(parameter, "SCB", None))
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]


def constants_of_layers(model: torch.nn.Module) -> list[torch.Tensor]:
    """The constants that 8-bit layers have taken over from their weights, as their first product
    does."""
    states = [getattr(module, "state", None) for module in model.modules()]
    scales = [getattr(state, "SCB", None) for state in states]
    return [tensor for tensor in scales if isinstance(tensor, torch.Tensor)]
