"""The ruler rounds as chapter 12 does, and the page says what Python computes."""

import pytest
import torch

from memlab.book.chapters import ruler
from memlab.book.chapters.ruler import BLOCKS, QuantizationRuler, figures

pytestmark = pytest.mark.slow  # a browser beside Python: left to make nightly


@pytest.fixture(scope="module")
def page(open_once):
    return open_once(QuantizationRuler())


def choose(page, bits, block, outlier, levels):
    page.set("levels", levels)
    page.set("bits", bits)
    page.set("block", BLOCKS.index(block))
    page.set("outlier", outlier)


@pytest.mark.parametrize("levels", ["linear", "nf4"])
@pytest.mark.parametrize("outlier", [0, 8, 60])
@pytest.mark.parametrize("bits, block", [(2, 256), (3, 16), (4, 64), (8, 128), (5, 32)])
def test_the_page_says_what_python_computes(page, bits, block, outlier, levels):
    choose(page, bits, block, outlier, levels)
    assert page.figures() == pytest.approx(figures(bits, block, outlier, levels), rel=1e-12)
    marks = 16 if levels == "nf4" else 2**bits - 1
    shown = page.run("[...panel.querySelectorAll('svg')].map(svg => Number(svg.dataset.marks))")
    assert shown == [marks] * (1 if block == 256 else 2)
    assert page.run("panel.querySelector('[name=bits]').disabled") == (levels == "nf4")


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_linear_marks_are_symmetric_rounding(bits):
    values = torch.tensor(ruler.VALUES, dtype=torch.float64).reshape(-1, 64)
    scale = values.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    back = (torch.round(values / scale) * scale).flatten()
    mine = ruler.rounded(ruler.VALUES, ruler.linear(bits), 64)
    torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), back)
    expected = ((values.flatten() - back).norm() / values.norm()).item()
    assert ruler.error(ruler.VALUES, mine) == pytest.approx(expected)


def test_nf4_is_the_librarys():
    bnb = pytest.importorskip("bitsandbytes")
    theirs = bnb.functional.get_4bit_type("nf4", device="cpu")
    torch.testing.assert_close(torch.tensor(ruler.normal_float()), theirs, rtol=0, atol=5e-7)


def test_every_field_changes_a_figure(page):
    start = dict(bits=4, block=64, outlier=10, levels="linear")
    for name, value in dict(bits=5, block=32, outlier=30, levels="nf4").items():
        choose(page, **start)
        before = page.figures()
        choose(page, **start | {name: value})
        assert page.figures() != before, name


def test_what_it_teaches_holds():
    plain, spoiled = figures(4, 256, 0, "linear"), figures(4, 256, 60, "linear")
    assert spoiled["zeros"] > 0.95 > 0.2 > plain["zeros"]
    assert figures(4, 16, 60, "linear")["zeros"] < 0.2  # the other blocks do not notice
    assert plain["nf4"] < plain["linear"]
    assert figures(4, 64, 0, "nf4")["weight"] == 4.5


@pytest.mark.parametrize(
    "wrong", [dict(bits=9), dict(block=20), dict(outlier=61), dict(levels="a")]
)
def test_bad_input_raises(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*allowed are"):
        QuantizationRuler(**wrong)
