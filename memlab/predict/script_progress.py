"""Where a script is that runs for long, a line on the terminal now and then."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from memlab.trace.user_frames import line_at_work

EVERY = 15.0  # seconds


@contextlib.contextmanager
def shows_where_it_is(script: Path, steps: Callable[[], int]) -> Iterator:
    """On a terminal say how many steps there were, and which line of the script is at work.

    A script that generates texts runs the model once per token, each at the pace of this machine's
    processor: minutes where a card takes seconds, and without a word of its own. steps: gives the
    optimizer steps made so far.
    """
    if not sys.stderr.isatty():
        yield
        return
    over, terminal, thread, began = (
        threading.Event(),
        sys.stderr,
        threading.get_ident(),
        time.time(),
    )

    def show() -> None:
        while not over.wait(EVERY):
            frame = sys._current_frames().get(thread)
            place = line_at_work(script, frame) or "a library"
            passed = f"{time.time() - began:.0f} s, {steps()} optimizer steps"
            print(f"memlab: {passed}, at work in {place}", file=terminal, flush=True)

    threading.Thread(target=show, daemon=True).start()
    try:
        yield
    finally:
        over.set()
