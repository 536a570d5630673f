"""Which line of a reader's script is at work: `train.py:57`.

Files beside the script count as its own, what is installed does not.
"""

import os
import traceback
from pathlib import Path
from types import FrameType


def line_at_work(script: Path, frame: FrameType | None) -> str:
    """The innermost line of the script in a frame and those that called it; empty for none."""
    while frame is not None:
        line = _own(script, frame.f_code.co_filename, frame.f_lineno)
        if line:
            return line
        frame = frame.f_back
    return ""


def line_of_error(script: Path, error: BaseException) -> str:
    """The script's last line in the traceback of an error; empty for none."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [_own(script, frame.filename, frame.lineno) for frame in frames]
    return next(filter(None, reversed(lines)), "")


def _own(script: Path, file: str, number: int | None) -> str:
    folder = f"{script.parent}{os.sep}"
    if not file.startswith(folder) or "site-packages" in file:
        return ""
    return f"{file.removeprefix(folder)}:{number}"
