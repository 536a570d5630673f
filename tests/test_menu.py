"""What is kept of every model in three ways on six cards (benchmarks/menu.py) is said today."""

import json
import random
import re
import sys
from pathlib import Path

import pytest

from memlab import find_gpu
from memlab.predict.formula import is_kept

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER.parent / "benchmarks"))
import menu  # noqa: E402

KEPT = json.loads((FOLDER / "menu.json").read_text())
CASES = [(name, way, gpu) for name in menu.NAMES for way in menu.WAYS for gpu in menu.CARDS]


def test_every_model_has_an_answer_in_one_line():
    for name, way, gpu in CASES:
        line = KEPT[name][way][gpu]
        size = r"[\d.]+( to [\d.]+)? GiB"
        assert re.fullmatch(rf"(fits|may fit|does not fit): {size}|refused: [^\n]+", line), line
    assert KEPT.keys() == set(menu.NAMES)


def is_quick(name, way, gpu):
    try:
        return is_kept(menu.recipe_of(name, way, gpu), find_gpu(gpu))
    except ValueError:  # refused at once
        return True


@pytest.mark.parametrize("seed", range(12))
def test_answers_with_a_kept_trace_are_todays(seed):
    draw = random.Random(seed)
    case = next(case for case in iter(lambda: draw.choice(CASES), None) if is_quick(*case))
    name, way, gpu = case
    assert menu.answer(*case) == KEPT[name][way][gpu], case
