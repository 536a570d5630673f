"""`torch.cuda.FloatTensor` and its like: types of tensors from before there were dtypes."""

import torch

from memlab.card.placement import CARD, HOST
from memlab.trace.tensors import on_card

NAMES = "Float Double Half BFloat16 Byte Char Short Int Long Bool".split()


def make(data, dtype, device) -> torch.Tensor:
    """What these types, and `tensor.new`, make of values or of sizes."""
    if len(data) == 1 and not isinstance(data[0], (int, torch.Size)):
        return torch.as_tensor(data[0], dtype=dtype, device=device)
    return torch.empty(*(data or (0,)), dtype=dtype, device=device)


class _OnCard(type):
    """Such a type of the card: it makes tensors, and tensors of its dtype are its instances."""

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
    """(device, dtype) that a dtype, or a type from before, stands for; None for no such thing.

    A dtype leaves the device as it is.
    """
    if isinstance(kind, torch.dtype):
        return None, kind
    if isinstance(kind, _OnCard):
        return CARD, kind.dtype
    name = f"{kind.__module__}.{kind.__name__}" if isinstance(kind, type) else str(kind)
    for prefix, device in (("torch.cuda.", CARD), ("torch.", HOST)):
        if name.removeprefix(prefix) in TYPES:
            return device, TYPES[name.removeprefix(prefix)].dtype
    return None
