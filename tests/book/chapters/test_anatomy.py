"""What the chapter on anatomy shows: known bytes at known moments, and pictures of them."""

import pytest

from memlab.book.chapters import anatomy


@pytest.mark.parametrize(
    "model, precision, attention, expected",
    [
        ("bert-large", "bf16", "eager", (34, 5)),  # Korthikanti and others, section 4.1
        ("bert-large", "fp32", "eager", (66, 9)),
        ("gpt2", "bf16", "sdpa", (58, 0)),
    ],
)
def test_coefficients_of_a_layer(model, precision, attention, expected):
    found = anatomy.coefficients(model, precision, attention)
    assert found == pytest.approx(expected, abs=0.1)
