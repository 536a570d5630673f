"""The line of the user's script that is running, such as `train.py:57`.

Files in the script's folder count as part of the script; installed packages do not.
"""

import os
import traceback
from pathlib import Path
from types import FrameType


def line_at_work(script: Path, frame: FrameType | None) -> str:
    """The script's innermost line in a frame and its callers; an empty text if there is none."""
    while frame is not None:
        line = _own(script, frame.f_code.co_filename, frame.f_lineno)
        if line:
            return line
        frame = frame.f_back
    return ""


def line_of_error(script: Path, error: BaseException) -> str:
    """The script's innermost line in the traceback of an error; an empty text if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [_own(script, frame.filename, frame.lineno) for frame in frames]
    return next(filter(None, reversed(lines)), "")


def _own(script: Path, file: str, number: int | None) -> str:
    folder = f"{script.parent}{os.sep}"
    # A virtual environment may be in the script's folder.
    if not file.startswith(folder) or "site-packages" in file:
        return ""
    return f"{file.removeprefix(folder)}:{number}"
