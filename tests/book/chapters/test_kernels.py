"""Pictures and figures of attention's kernels."""

import pytest
import torch
import torch.nn.functional as F

from memlab.book.chapters import attention, kernels


def test_each_line_of_the_peaks_has_its_name():
    lengths = [256 * 2**i for i in range(7)]
    ways = "three lines", "math", "memory-efficient", "flash"
    figure = kernels.peaks_figure(lengths, {name: lengths for name in ways})
    assert [text.get_text() for text in figure.axes[0].texts] == list(ways)


def test_a_square_adds_four_times_as_much_and_a_line_twice():
    assert kernels.growth_of([n * n for n in (1, 2, 4)]) == 4
    assert kernels.growth_of([7 + 3 * n for n in (1, 2, 4)]) == 2


def test_estimates_grow_with_the_length():
    short, long = (kernels.estimated(F.scaled_dot_product_attention, n) for n in (1024, 4096))
    assert 4 < long / short < 17


def test_a_distance_is_the_largest_error():
    def doubled(x, size):
        return x.max(), 2 * (x - x.max()).exp().sum()

    naive, wrong = attention.distances(torch.zeros(4), doubled)
    assert naive == pytest.approx(0, abs=1e-7) and wrong == pytest.approx(1 / 8)


def test_curves_are_as_far_apart_as_at_their_worst_step():
    found = attention.apart_and_fallen({"a": [3.0, 2.0, 1.0], "b": [3.0, 2.5, 1.25]})
    assert found == (0.5, 2.0)
