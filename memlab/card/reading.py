"""What code reads of a simulated card: values that are known, and stand-ins for others."""

from memlab.card import known_values
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
        answer = known_values.compare(func, args, kwargs)
        known = known_values.all_known(args, kwargs)
        return answer if known else self.waits.answer(answer, args[0])

    def host_copy(self, tensor):
        """An ordinary tensor for a fake one, as `memlab.card.known_values.host_copy` makes it."""
        known = known_values.values_of(tensor) is not None or tensor.numel() != 1
        return known_values.host_copy(tensor, None if known else self.item(tensor))
