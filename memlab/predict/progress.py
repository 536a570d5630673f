"""How far a run is: a line of text that is wiped out in the end, also in a notebook."""

import sys
from typing import Any

from tqdm import tqdm


class Progress(tqdm):
    """A bar that leaves nothing behind, and says nothing inside of another one.

    A notebook shows no second line below the first; and of a widget one that was saved says "model
    not found". In a file or a pipe there is no line to wipe out, and so there is none. delay:
    seconds before it appears.
    """

    def __init__(self, *args: Any, delay: float = 2, **settings: Any) -> None:
        if len(Progress._instances) > 1:  # open ones, this among them
            settings["disable"] = True
        elif not (sys.stderr.isatty() or "ipykernel" in sys.modules):
            settings.setdefault("disable", True)
        super().__init__(*args, leave=False, delay=delay, **settings)
