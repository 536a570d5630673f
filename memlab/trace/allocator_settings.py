"""What a program says of PyTorch's allocator: `PYTORCH_ALLOC_CONF`, and settings while it runs."""

import os
import re

from memlab.trace.card_memory import CardMemory

# The first that is set counts, alone: so does PyTorch 2.13 (c10/core/AllocatorConfig.cpp).
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
CALL = "torch.cuda.memory._set_allocator_settings"


class AllocatorSettings:
    """The settings of a card's allocator.

    assumptions: a dict that takes a line for each setting. text: as the program said it last.
    PyTorch reads the environment when it first uses CUDA; here that is the first allocation on the
    card, so a program may set the variable until then.
    """

    def __init__(self, memory: CardMemory, assumptions: dict, reads_environment: bool):
        self.memory, self.assumptions, self.text = memory, assumptions, ""
        memory.before_first = self.read if reads_environment else None

    def read(self) -> None:
        """Read the environment, once. Raises ValueError for a value that PyTorch refuses."""
        self.memory.before_first = None
        for name in VARIABLES:
            if name in os.environ:
                self._apply(os.environ[name], name)
                return

    def change(self, text: str) -> None:
        """What `torch.cuda.memory._set_allocator_settings` does, for what is allocated from now on.

        Raises ValueError for a value that PyTorch refuses.
        """
        if self.memory.before_first:
            self.read()
        self._apply(text, CALL)

    def last(self) -> str:
        """What `torch._C._accelerator_getAllocatorSettings` gives."""
        return self.text

    def _apply(self, text: str, source: str) -> None:
        self.text = text
        for setting in filter(None, re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text))):
            key, _, value = setting.partition(":")
            if key != "expandable_segments":
                line = f"{source}: {key} is not simulated, the allocator has its default"
            elif value not in ("True", "False"):
                raise ValueError(f"{source} has {setting}: allowed are True, False")
            else:
                self.memory.expandable_segments = value == "True"
                line = f"{source}: {setting}, in what is allocated from then on"
            if setting != "expandable_segments:False":
                self.assumptions[line] = None
