"""`torch.cuda.FloatTensor` and the other tensor types from before PyTorch had dtypes."""

import torch

from memlab.card.placement import CARD, HOST
from memlab.trace.tensors import on_card

NAMES = "Float Double Half BFloat16 Byte Char Short Int Long Bool".split()


def make(data, dtype, device) -> torch.Tensor:
    """The tensor that such a type, or `tensor.new`, makes of values or of sizes.

    data: a sequence of values, or sizes as numbers or as a torch.Size.
    """
    if len(data) == 1 and not isinstance(data[0], (int, torch.Size)):
        return torch.as_tensor(data[0], dtype=dtype, device=device)
    return torch.empty(*(data or (0,)), dtype=dtype, device=device)


class _OnCard(type):
    """A legacy type of the GPU: a call makes a GPU tensor, isinstance checks dtype and device."""

    dtype: torch.dtype

    def __call__(cls, *data):
        return make(data, cls.dtype, CARD)

    def __instancecheck__(cls, instance):
        return (
            isinstance(instance, torch.Tensor) and instance.dtype == cls.dtype and on_card(instance)
        )


TYPES = {
    f"{name}Tensor": _OnCard(f"{name}Tensor", (), {"dtype": getattr(torch, f"{name}Tensor").dtype})
    for name in NAMES
}


def parse(kind) -> tuple[torch.device | None, torch.dtype] | None:
    """(device, dtype) of a dtype, a legacy type or its name; None for anything else.

    The device is None for a dtype, which leaves a tensor where it is.
    """
    if isinstance(kind, torch.dtype):
        return None, kind
    if isinstance(kind, _OnCard):
        return CARD, kind.dtype
    # torch.FloatTensor, a class, or its name: "torch.FloatTensor", "torch.cuda.FloatTensor"
    name = f"{kind.__module__}.{kind.__name__}" if isinstance(kind, type) else str(kind)
    for prefix, device in (("torch.cuda.", CARD), ("torch.", HOST)):
        if name.removeprefix(prefix) in TYPES:
            return device, TYPES[name.removeprefix(prefix)].dtype
    return None
