"""Seconds as text."""

import pytest

from memlab.units import seconds_text


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
