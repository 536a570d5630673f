"""Bytes and seconds as text."""

import pytest

from memlab.units import round_up, seconds_text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.0123, "12.3 ms"),
        (1, "1.00 s"),
        (12.34, "12.3 s"),
        (123.4, "123 s"),
        (12345.6, "12,346 s"),
    ],
)
def test_seconds_have_three_figures_that_count(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize("number, multiple", [(0, 0), (1, 512), (512, 512), (513, 1024)])
def test_round_up_gives_the_next_multiple(number, multiple):
    assert round_up(number, 512) == multiple
