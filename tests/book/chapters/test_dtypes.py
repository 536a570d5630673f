"""Number formats compared: limits, steps drawn, bytes of a built model, estimated speeds."""

import pytest
import torch

from memlab import Recipe
from memlab.book.chapters import dtypes


def test_limits_say_the_bits_and_the_bytes_that_they_take():
    limits = dtypes.limits()
    assert list(limits.loc["tf32", ["bits", "bytes", "step at 1"]]) == ["1-8-10", "4", "0.000977"]
    assert list(limits.loc["fp4 E3M0"]) == ["1-3-0", "0.5", "16", "0.25", "1"]
    assert list(limits.loc["int8"]) == ["1-7", "1", "127", "1", "1"]


def test_each_line_goes_from_the_smallest_number_to_the_largest():
    figure = dtypes.range_figure(lambda x, known: x * known.epsilon)
    wide, small = ([line.get_xydata() for line in axis.lines] for axis in figure.axes)
    assert len(wide) == 4 and len(small) == 8
    assert wide[3].tolist() == small[0].tolist() == [[p, -10] for p in range(-24, 16)]
    named = [text.get_text() for axis in figure.axes for text in axis.texts]
    assert set(named) == set(dtypes.FORMATS)


@pytest.mark.slow
def test_converting_afterwards_needs_the_large_model_first():
    built = dtypes.built_in_formats("distilbert-tiny", torch.device("cpu"))
    stays, measured = built["stays"], built["measured"]
    assert stays["fp16"] == stays["bf16"] == stays["fp32, then fp16"] == stays["fp32"] / 2
    assert measured["fp32, then fp16"] > measured["fp32"] > measured["fp16"]
    assert all(-0.02 < one <= 0 for one in built["error"])


def test_what_does_not_fit_here_is_not_built(monkeypatch, capsys):
    monkeypatch.setattr(dtypes, "room_on", lambda device: 0)
    built = dtypes.built_in_formats("distilbert-tiny", torch.device("cpu"))
    assert built["measured"].isna().all() and (built["predicted peak"] >= built["stays"]).all()
    assert capsys.readouterr().out.count("distilbert-tiny is too large") == 4


def test_every_format_is_stored_with_a_scale_and_without():
    class Patients:
        def harm_of(self, rounding):
            return rounding(3.0)

    def stored(weight, known, scaled):
        return weight, known.name, scaled

    harm = dtypes.harm_of_storing(stored, Patients())
    assert len(harm) == 2 * len(dtypes.STORED)
    assert harm["int4", "scaled"] == (3.0, "int4", True)
    assert harm["bf16", "bare"] == (3.0, "bf16", False)


def test_a_card_has_no_rate_of_what_it_does_not_multiply():
    rates = dtypes.peak_rates(["T4", "A100-80GB", "B200"])
    assert rates.loc["A100-80GB", "tf32"] == pytest.approx(156)
    missing = {card: set(row.index[row.isna()]) for card, row in rates.iterrows()}
    assert missing == {
        "T4": {"tf32", "bf16", "fp8", "fp4"},
        "A100-80GB": {"fp8", "fp4"},
        "B200": set(),
    }


def test_tf32_is_faster_and_its_switch_is_put_back():
    before = torch.backends.cuda.matmul.allow_tf32
    recipe = Recipe("bert-large-tiny", batch_size=64, seq_len=512)
    assert dtypes.tf32_speedup(recipe, "A100-80GB") > 1
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_conversions_are_timed_against_a_copy():
    took = dtypes.conversion_times(torch.device("cpu"), count=1000)
    assert took["copy"] == 1 and set(took.index) == {"copy", "to fp32", "from fp32"}
