"""The bit explorer in a browser, against torch, ml_dtypes and exact arithmetic."""

import json
import math
import struct

import numpy as np
import pytest
import torch
from exact import ML_DTYPES, exact_code, finite, interesting, value
from notebook import Notebook

from memlab.panels.bits import BitExplorer

pytestmark = pytest.mark.slow  # a browser beside Python: left to make nightly

FORMATS = Notebook("02-dtypes").run("formats-code formats-table")["FORMATS"]
TORCH = {
    "fp32": (torch.float32, torch.int32),
    "bf16": (torch.bfloat16, torch.int16),
    "fp16": (torch.float16, torch.int16),
    "fp8 E5M2": (torch.float8_e5m2, torch.uint8),
    "fp8 E4M3": (torch.float8_e4m3fn, torch.uint8),
}
INTEGERS = {"int16": torch.int16, "int8": torch.int8}
SMALL = [name for name, known in FORMATS.items() if known.bits <= 16]
FLOATS = [name for name, known in FORMATS.items() if known.exponent]


def as_fp32(numbers):
    with np.errstate(over="ignore"):
        return np.array(numbers, dtype=np.float64).astype(np.float32)


def random_fp32(count=20_000, seed=0):
    """Random bit patterns: every magnitude, subnormals, infinities and NaN among them."""
    codes = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    return codes.view(np.float32)


# The explorer's arithmetic, in the browser


@pytest.fixture(scope="module")
def tab(chromium, tmp_path_factory):
    page = tmp_path_factory.mktemp("bits") / "bits.html"
    body = BitExplorer()._repr_html_()
    phone = '<meta name="viewport" content="width=device-width">'
    page.write_text(f"<!doctype html><meta charset=utf8>{phone}<title>bits</title>{body}{body}")
    opened = chromium.open(page.as_uri(), width=390)
    yield opened
    opened.close()


def encoded(tab, name, doubles):
    """The codes that the page computes; the doubles go there as their 64 bits, in hexadecimal."""
    words = json.dumps([struct.pack(">d", x).hex() for x in doubles])
    place = list(FORMATS).index(name)
    return tab.run(f"""{words}.map(word => {{
        const view = new DataView(new ArrayBuffer(8));
        view.setBigUint64(0, BigInt("0x" + word));
        return memlabBits.encode(memlabBits.FORMATS[{place}], view.getFloat64(0));
    }})""")


def decoded(tab, name, codes):
    place = list(FORMATS).index(name)
    texts = tab.run(
        f"{json.dumps(codes)}.map(c => {{"
        f"const x = memlabBits.decode(memlabBits.FORMATS[{place}], c);"
        "return Object.is(x, -0) ? '-0.0' : String(x).replace('Infinity', 'inf'); })"
    )
    return [float(text) for text in texts]


@pytest.mark.parametrize("name", SMALL)
def test_the_page_rounds_as_exact_arithmetic_does(tab, name):
    known, numbers = FORMATS[name], finite(FORMATS[name])
    doubles = interesting(known)
    wanted = [exact_code(known, x, numbers) for x in doubles]
    found = encoded(tab, name, doubles)
    for place, x in enumerate(doubles):
        if math.isnan(x) and known.special != "none":  # any NaN is as good as another
            assert math.isnan(value(known, found[place]))
            found[place] = None
    wrong = [(x.hex(), w, f) for x, w, f in zip(doubles, wanted, found, strict=True) if w != f]
    assert wrong == []


@pytest.mark.parametrize("name", TORCH)
def test_the_page_stores_the_bits_that_torch_stores(tab, name):
    dtype, whole = TORCH[name]
    near = interesting(FORMATS[name]) if name in SMALL else []
    x = np.concatenate([random_fp32(), as_fp32(near)])
    theirs = torch.from_numpy(x).to(dtype).view(whole).tolist()
    theirs = [code % 2 ** FORMATS[name].bits for code in theirs]
    ours = encoded(tab, name, x.tolist())
    number = ~np.isnan(x)
    assert number.sum() > 10_000 and (~number).sum() > 10
    np.testing.assert_array_equal(np.array(ours)[number], np.array(theirs)[number])
    assert all(np.isnan(decoded(tab, name, np.array(ours)[~number].tolist())))
    assert all(torch.from_numpy(x[~number]).to(dtype).float().isnan())


@pytest.mark.parametrize("name", ML_DTYPES)
def test_the_page_stores_the_bits_that_ml_dtypes_stores(tab, name):
    dtype, whole = ML_DTYPES[name]
    x = np.concatenate([random_fp32(seed=1), as_fp32(interesting(FORMATS[name], seed=1))])
    x = x[~np.isnan(x)]
    if name == "fp8 E4M3":  # ml_dtypes makes NaN of what overflows, torch and the page do not
        x = x[np.abs(x) <= 464]
    with np.errstate(over="ignore", invalid="ignore"):
        theirs = x.astype(dtype).view(whole).tolist()
    assert len(theirs) > 5_000
    assert encoded(tab, name, x.tolist()) == theirs


@pytest.mark.parametrize("name", INTEGERS)
def test_the_page_rounds_and_holds_integers_as_torch_does_when_asked(tab, name):
    known, dtype = FORMATS[name], INTEGERS[name]
    x = torch.tensor([x for x in interesting(known) if not math.isnan(x)], dtype=torch.float64)
    limits = torch.iinfo(dtype)
    theirs = x.round().clamp(limits.min, limits.max).to(dtype).tolist()
    codes = encoded(tab, name, x.tolist())
    assert decoded(tab, name, codes) == theirs
    assert codes == [n % 2**known.bits for n in theirs]


def test_the_page_rounds_to_tf32_to_nearest_ties_away(tab):
    """What PTX's cvt.rna.tf32.f32 does: add half a unit to the fp32 bits and cut 13 of them."""
    x = random_fp32(seed=2)
    bits = x.view(np.uint32).astype(np.int64)
    ties = (bits[:2000] & ~0x1FFF) | 0x1000  # halfway between two neighbours
    bits = np.concatenate([bits, ties])
    bits = bits[(bits & 0x7F800000) != 0x7F800000]
    doubles = bits.astype(np.uint32).view(np.float32).astype(np.float64).tolist()
    assert encoded(tab, "tf32", doubles) == ((bits + 0x1000) >> 13).tolist()


def test_e3m0_rounds_between_its_powers_of_two(tab):
    given = [0.125, 0.126, 0.374, 0.375, 0.75, 1.49, 1.5, 3, 6, 12, 17, math.inf, -3, math.nan]
    codes = encoded(tab, "fp4 E3M0", given)
    assert codes.pop() is None
    stored = [0, 0.25, 0.25, 0.5, 1, 1, 2, 4, 8, 16, 16, 16, -4]
    assert decoded(tab, "fp4 E3M0", codes) == stored


@pytest.mark.parametrize("name", SMALL)
def test_every_code_is_read_and_written_back(tab, name):
    known = FORMATS[name]
    codes = list(range(2**known.bits))
    numbers = decoded(tab, name, codes)
    np.testing.assert_array_equal(numbers, [float(value(known, code)) for code in codes])
    kept = [code for code, x in zip(codes, numbers, strict=True) if not math.isnan(x)]
    back = encoded(tab, name, [numbers[code] for code in kept])
    assert back == kept


# The explorer as a reader meets it


def text_of(tab, name):
    place = list(FORMATS).index(name)
    return tab.run(f"document.querySelectorAll('.bit-explorer .row')[{place}].innerText")


def bits_of(tab, name):
    place = list(FORMATS).index(name)
    return tab.run(
        f"[...document.querySelectorAll('.bit-explorer .row')[{place}]"
        ".querySelectorAll('.code button')].map(b => b.textContent).join('')"
    )


def type_in(tab, text):
    tab.run(
        f"(input => {{ input.value = {json.dumps(text)};"
        "input.dispatchEvent(new Event('input')); })(document.querySelector('.bit-explorer input'))"
    )
    return tab.run("document.querySelector('.bit-explorer .said').textContent")


def press(tab, key, code=None):
    for kind in ("keyDown", "keyUp"):
        more = {"text": " "} if key == " " and kind == "keyDown" else {}
        tab.send("Input.dispatchKeyEvent", type=kind, key=key, code=code or key, **more)


def test_a_number_is_shown_in_every_format(tab):
    assert type_in(tab, "0.1") == ""
    assert bits_of(tab, "fp32") == f"{np.float32(0.1).view(np.uint32):032b}"
    assert bits_of(tab, "bf16") == "0011110111001101"
    assert "0.10009765625" in text_of(tab, "bf16")
    assert "becomes zero" in text_of(tab, "int8")
    type_in(tab, "65520")
    assert "inf" in text_of(tab, "fp16") and "overflow" in text_of(tab, "fp16")
    assert "exact" in text_of(tab, "fp32")
    assert "448" in text_of(tab, "fp8 E4M3") and "largest" in text_of(tab, "fp8 E4M3")
    type_in(tab, "nan")
    assert "no code for NaN" in text_of(tab, "fp4 E2M1")
    assert bits_of(tab, "fp4 E2M1") == "––––"


@pytest.mark.parametrize(
    "text, number",
    [
        ("1/3", 1 / 3),
        ("-2^-24", -(2.0**-24)),
        ("2**10", 1024),
        ("1+2^-8", 1 + 2**-8),
        (" 1e-8 ", 1e-8),
        (".5", 0.5),
        ("-0", -0.0),
        ("-inf", -math.inf),
        ("1e999", math.inf),
    ],
)
def test_what_may_be_typed(tab, text, number):
    assert type_in(tab, text) == ""
    parsed = tab.run(f"(x => Object.is(x, -0) ? '-0.0' : String(x))(memlabBits.parse({text!r}))")
    assert float(parsed.replace("Infinity", "inf")) == number
    assert math.copysign(1, float(parsed.replace("Infinity", "inf"))) == math.copysign(1, number)


@pytest.mark.parametrize("text", ["", "abc", "0,5", "1e", "1 2", "--1", "2^", "alert(1)", "<b>"])
def test_what_is_no_number_is_said_and_changes_nothing(tab, text):
    type_in(tab, "3")
    before = bits_of(tab, "fp16")
    said = type_in(tab, text)
    assert f"“{text}” is not a number: allowed are" in said
    assert bits_of(tab, "fp16") == before


def test_bits_are_flipped_by_keyboard_and_by_click(tab):
    type_in(tab, "1")
    place = list(FORMATS).index("bf16")
    row = f"document.querySelectorAll('.bit-explorer .row')[{place}]"
    stops = f"{row}.querySelectorAll('.code button[tabindex=\"0\"]').length"
    assert tab.run(stops) == 1
    tab.run(f"{row}.querySelector('.code button').focus()")
    press(tab, " ", "Space")
    assert tab.run("document.querySelector('.bit-explorer input').value") == "-1"
    press(tab, "End")
    press(tab, " ", "Space")
    assert tab.run("document.querySelector('.bit-explorer input').value") == "-1.0078125"
    assert tab.run(stops) == 1
    assert "bf16: this code is -1.0078125" in tab.run(
        "document.querySelector('.bit-explorer .said').textContent"
    )
    press(tab, "ArrowLeft")
    assert "mantissa bit 6 of 7" in tab.run("document.activeElement.getAttribute('aria-label')")
    tab.run(f"{row}.querySelector('.code button').click()")
    assert tab.run("document.querySelector('.bit-explorer input').value") == "1.0078125"


def test_every_pick_works_and_two_explorers_live_side_by_side(tab):
    count = tab.run("""(() => {
        const picks = [...document.querySelectorAll('.bit-explorer .picks button')];
        picks.forEach(pick => pick.click());
        return picks.filter(pick => {
            pick.click();
            return document.querySelector('.bit-explorer .said').textContent === '';
        }).length - picks.length;
    })()""")
    assert count == 0
    assert tab.run("document.querySelectorAll('.bit-explorer .row').length") == 2 * len(FORMATS)
    assert tab.run("document.documentElement.scrollWidth") <= 390
    assert tab.complaints == []
    assert [r for r in tab.requests if not r.startswith("file:")] == []


def test_without_a_page_it_says_what_it_is():
    assert "bit explorer" in repr(BitExplorer())
    html = BitExplorer()._repr_html_()
    assert "http" not in html and "/* " not in html.replace("/* script */", "")
