"""Progress lines on the terminal while a long-running script is simulated."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from memlab.trace.user_frames import line_at_work

EVERY = 15.0  # seconds between lines


@contextlib.contextmanager
def shows_where_it_is(script: Path, steps: Callable[[], int]) -> Iterator:
    """Print the optimizer steps so far and the line of the script that runs, on a terminal only.

    steps: returns the number of optimizer steps so far.

    A script that generates text runs the model once per token, at the speed of this machine's CPU.
    That takes minutes where a GPU takes seconds, and the script itself may print nothing meanwhile.
    """
    if not sys.stderr.isatty():
        yield
        return
    over, terminal, thread, began = (
        threading.Event(),
        sys.stderr,  # as it is now: the script may replace it
        threading.get_ident(),
        time.time(),
    )

    def show() -> None:
        while not over.wait(EVERY):
            # The frame of the thread that runs the script, seen from this one.
            frame = sys._current_frames().get(thread)
            place = line_at_work(script, frame) or "a library"
            passed = f"{time.time() - began:.0f} s, {steps()} optimizer steps"
            print(f"memlab: {passed}, now in {place}", file=terminal, flush=True)

    threading.Thread(target=show, daemon=True).start()
    try:
        yield
    finally:
        over.set()
