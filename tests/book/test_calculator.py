"""The calculator says in a browser what `memlab.formula` says in Python, and takes any reader."""

import json
import random

import pytest

from memlab import Recipe, formula, models
from memlab.book.calculator import CHOICES, NUMBERS, TRAINED, Calculator
from memlab.gpus import GPUS

GIB = 2**30


@pytest.fixture(scope="module")
def page(open_once):
    page = open_once(Calculator())
    page.run("new Promise(done => { const look = () => panel.calculator ? done() : "
             "setTimeout(look, 20); look(); })")  # fmt: skip
    return page


@pytest.fixture(scope="module")
def known():
    return Calculator().known()


def drawn_settings(known, number):
    """Settings that the calculator's switches can have, with sizes that a reader may type."""
    draw, found = random.Random(3), []
    while len(found) < number:
        model = draw.choice(list(known["models"]))
        longest = min(known["models"][model]["longest"] or 4096, 8192)
        settings = {name: draw.choice(choices) for name, choices in known["choices"].items()}
        settings |= {
            "model": model,
            "gpu": draw.choice([*GPUS, "another, by its GiB"]),
            "gib": draw.choice([8, 24, 95.5]),
            "batch_size": draw.choice([1, 2, 3, 8, 17, 64]),
            "seq_len": draw.randint(1, longest),
            "accumulation": draw.choice([1, 1, 2, 16]),
            "lora_rank": draw.choice([1, 8, 13, 64]),
        }
        found.append({name: str(value) for name, value in settings.items()})
    return found


def in_python(settings):
    """The footprint of settings, or the words of the refusal."""
    values = {name: settings[name] for name in ("model", *CHOICES)}
    values |= {name: int(settings[name]) for name in NUMBERS[:3]}
    trained = TRAINED[settings["trained"]]
    values |= trained | (
        {"lora_rank": int(settings["lora_rank"])} if "lora_rank" in trained else {}
    )
    by_size = settings["gpu"] not in GPUS
    try:
        card = int(float(settings["gib"]) * GIB) if by_size else settings["gpu"]
        return formula(Recipe(**values), card)
    except ValueError as error:
        return str(error)


def in_page(page, asked):
    """What the page answers to a list of settings."""
    return page.run(f"""{json.dumps(asked)}.map(settings => {{
        try {{ return panel.calculator.answer(settings).found; }}
        catch (error) {{ return error.message; }}
    }})""")


def test_it_says_what_python_says(page, known):
    asked = drawn_settings(known, 600)
    answered = 0
    for settings, found in zip(asked, in_page(page, asked), strict=True):
        wanted = in_python(settings)
        if isinstance(wanted, str):
            assert isinstance(found, str), settings
            assert found == wanted or "no coefficients" in found and "no coefficients" in wanted
            continue
        answered += 1
        assert not isinstance(found, str), (settings, found)
        for name in ("peak_allocated", "breakdown", "peak_phase", "parameters"):
            assert found[name] == getattr(wanted, name), (settings, name)
        assert tuple(found["reserved_range"]) == wanted.reserved_range, settings
        assert found["trainable_parameters"] == wanted.trainable_parameters
        if wanted.step_time is None:
            assert found["step_time"] is None
            continue
        assert found["step_time"]["parts"] == pytest.approx(wanted.step_time.parts, rel=1e-9)
        for name in ("low", "expected", "high"):
            assert found["step_time"][name] == pytest.approx(getattr(wanted.step_time, name))
    assert answered >= 200
