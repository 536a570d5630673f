"""The bit explorer in a browser, against the formats' definitions."""

import json
import math

import numpy as np
import pytest
from exact import roundings, value
from notebook import Notebook

from memlab.panels.bits import BitExplorer

pytestmark = pytest.mark.slow  # a browser beside Python: left to make nightly

FORMATS = Notebook("02-dtypes").run("formats-code formats-table")["FORMATS"]
PLACES = {name: place for place, name in enumerate(FORMATS)}
SMALL = [name for name, known in FORMATS.items() if known.bits <= 16]


@pytest.fixture(scope="module")
def page(open_once):
    return open_once(BitExplorer())


def encoded(page, name, numbers):
    """The codes that the page computes; JSON has every double, but no infinity."""
    texts = [repr(float(x)).replace("inf", "Infinity").replace("nan", "NaN") for x in numbers]
    encode = f"x => panel.bits.encode(panel.bits.formats[{PLACES[name]}], Number(x))"
    return page.run(f"{json.dumps(texts)}.map({encode})")


def decoded(page, name, codes):
    decode = f"code => String(panel.bits.decode(panel.bits.formats[{PLACES[name]}], code))"
    texts = page.run(f"{json.dumps(codes)}.map({decode})")
    return [float(text.replace("Infinity", "inf")) for text in texts]


@pytest.mark.parametrize("name", FORMATS)
def test_the_page_rounds_to_the_nearest(page, name):
    known = FORMATS[name]
    given, codes = zip(*roundings(known), strict=True)
    assert encoded(page, name, given) == list(codes)
    below = encoded(page, name, [-x for x in given])
    if known.exponent:
        assert below == [code + 2 ** (known.bits - 1) for code in codes]
        assert encoded(page, name, [math.nan, -0.0])[1] == 2 ** (known.bits - 1)
    else:  # in two's complement there is one number more below zero
        assert below[:-2] == [-code % 2**known.bits for code in codes[:-2]]
        assert below[-2:] == [2 ** (known.bits - 1)] * 2


@pytest.mark.parametrize("name", SMALL)
def test_every_code_is_read(page, name):
    codes = list(range(2 ** FORMATS[name].bits))
    wanted = [value(FORMATS[name], code) for code in codes]
    np.testing.assert_array_equal(decoded(page, name, codes), wanted)


# The explorer as a reader meets it


def row(name):
    return f"panel.querySelectorAll('.format')[{PLACES[name]}]"


def bits_of(page, name):
    return page.run(f"[...{row(name)}.querySelectorAll('button')].map(b => b.textContent).join('')")


def type_in(page, text):
    page.set("number", text)
    return page.said()


def test_a_number_is_shown_in_every_format(page):
    type_in(page, "65520")
    said = {name: page.run(f"{row(name)}.innerText") for name in FORMATS}
    assert "inf" in said["fp16"] and "overflow" in said["fp16"] and "exact" in said["fp32"]
    assert "448" in said["fp8 E4M3"] and "largest" in said["fp8 E4M3"]
    assert bits_of(page, "bf16") == "0100011110000000"
    type_in(page, "nan")
    assert bits_of(page, "fp4 E2M1") == "––––"


@pytest.mark.parametrize(
    "text, number",
    [
        ("1/3", 1 / 3),
        ("-2^-24", -(2.0**-24)),
        ("2**10", 1024),
        ("1+2^-8", 1 + 2**-8),
        (" 1e-8 ", 1e-8),
        (".5", 0.5),
        ("-inf", -math.inf),
        ("1e999", math.inf),
    ],
)
def test_what_may_be_typed(page, text, number):
    assert type_in(page, text) == ""
    parsed = page.run(f"String(panel.bits.parse({text!r}))")
    assert float(parsed.replace("Infinity", "inf")) == number


@pytest.mark.parametrize("text", ["", "abc", "0,5", "1e", "1 2", "--1", "2^", "alert(1)", "<b>"])
def test_what_is_no_number_is_said_and_changes_nothing(page, text):
    type_in(page, "3")
    before = bits_of(page, "fp16")
    assert f"“{text}” is not a number: allowed are" in type_in(page, text)
    assert bits_of(page, "fp16") == before


def test_bits_are_flipped_by_keyboard_and_by_click(page):
    type_in(page, "1")
    shown = "panel.querySelector('input').value"
    page.run(f"{row('bf16')}.querySelector('.code button').focus()")
    for key in ("End", "ArrowLeft"):
        page.press(key)
    assert "mantissa bit 6 of 7" in page.run("document.activeElement.getAttribute('aria-label')")
    page.press(" ", code="Space", text=" ")
    assert page.run(shown) == "1.015625"
    page.run(f"{row('bf16')}.querySelector('.code button').click()")
    assert page.run(shown) == "-1.015625"


def test_on_a_phone_each_part_of_a_number_is_one_line(open_once):
    page = open_once(BitExplorer(), body=' style="margin: 24px"')  # of the book's pages
    parts = "[...panel.querySelectorAll('.part')].map(part => part.clientHeight)"
    assert len(set(page.run(parts))) == 1


def test_every_pick_works(page):
    for pick in range(page.run("panel.querySelectorAll('.picks button').length")):
        page.click(".picks button", pick)
        assert page.said() == ""
