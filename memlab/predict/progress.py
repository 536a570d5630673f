"""A progress bar as one line of text that is erased at the end, in notebooks too."""

import sys
from typing import Any

from tqdm import tqdm


class Progress(tqdm):
    """A progress bar that leaves no output behind, and that is silent inside another one.

    delay: seconds before the bar appears.

    The bar is text in notebooks too, because a saved notebook shows a widget as "model not found".
    Nested bars are silent, because a notebook has no second line of text below the first. Without a
    terminal or a notebook no line could be erased, so a file or a pipe gets no bar.
    """

    def __init__(self, *args: Any, delay: float = 2, **settings: Any) -> None:
        # tqdm keeps its open bars here; `tqdm.__new__` has already added this one.
        if len(Progress._instances) > 1:
            settings["disable"] = True
        elif not (sys.stderr.isatty() or "ipykernel" in sys.modules):
            settings.setdefault("disable", True)
        super().__init__(*args, leave=False, delay=delay, **settings)
