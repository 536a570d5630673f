"""What code reads of a simulated card: values that are known, and stand-ins for others."""

import torch

from memlab.card import known_values
from memlab.card.placement import with_data
from memlab.card.waiting import Waits


class Reader:
    """Answers `.item()`, comparisons and copies to the host.

    waits: the loops that wait for a value, to which a stand-in may have to change.
    """

    def __init__(self, waits: Waits):
        self.waits = waits

    def item(self, tensor):
        """What `.item()` gives: the value if it is known, else one that stands for it."""
        value = known_values.item_value(tensor)
        return value if known_values.is_decided(tensor) else self.waits.answer(value, tensor)

    def compare(self, func, args, kwargs) -> bool:
        """What `torch.equal` or `torch.allclose` gives."""
        if known_values.all_known(args, kwargs):
            return known_values.run_on_values(func, args, kwargs)
        return self.waits.answer(known_values.read_alike(*args[:2]), args[0])

    def host_copy(self, tensor):
        """An ordinary tensor for a fake one: its values, or what stands for them.

        Large ones hold zeros, whose memory the system does not take before they are read.
        """
        values = known_values.values_of(tensor)
        number = 0
        if values is None and tensor.nbytes <= 2**24:
            read = self.item if tensor.numel() == 1 else known_values.stand_in_number
            number = read(tensor)
        with with_data():
            if values is not None:
                return values.clone()
            if not number:
                return torch.zeros(tensor.shape, dtype=tensor.dtype)
            return torch.full(tensor.shape, number, dtype=tensor.dtype)
