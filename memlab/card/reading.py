"""Reading values from the simulated GPU: known values, and stand-ins for unknown ones."""

import torch

from memlab.card import known_values
from memlab.card.placement import with_data
from memlab.card.waiting import Waits


class Reader:
    """Answers `.item()`, comparisons and copies to the host.

    waits: the loops that wait for a value, and may need another stand-in to end.
    """

    def __init__(self, waits: Waits):
        self.waits = waits

    def item(self, tensor):
        """The result of `.item()`: the value if it is known, else a stand-in."""
        value = known_values.item_value(tensor)
        return value if known_values.is_decided(tensor) else self.waits.answer(value, tensor)

    def compare(self, func, args, kwargs) -> bool:
        """The result of `torch.equal` or `torch.allclose`."""
        if known_values.all_known(args, kwargs):
            return known_values.run_on_values(func, args, kwargs)
        return self.waits.answer(known_values.read_alike(*args[:2]), args[0])

    def host_copy(self, tensor):
        """An ordinary tensor with the values of a fake one, or with their stand-in.

        Above 16 MiB unknown values are zeros, because the operating system gives zeroed memory
        only when it is touched.
        """
        values = known_values.values_of(tensor)
        number = 0
        if values is None and tensor.nbytes <= 2**24:
            # A copy of a single number is a reading, which a loop may wait for, like `.item()`.
            read = self.item if tensor.numel() == 1 else known_values.stand_in_number
            number = read(tensor)
        with with_data():
            if values is not None:
                return values.clone()
            if not number:
                return torch.zeros(tensor.shape, dtype=tensor.dtype)
            return torch.full(tensor.shape, number, dtype=tensor.dtype)
