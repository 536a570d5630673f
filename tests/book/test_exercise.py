"""Answers to exercises."""

import numpy as np
import pytest
import torch

from memlab import check


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (100, 100),
        (100.5, 100),
        (0, 0),
        ("b", "b"),
        ([1, 2], [1, 2]),
        (np.int64(2), 2),
        (torch.tensor(0.5), 0.5),
        (2, np.argmax([1, 2, 3])),
    ],
)
def test_right_answers(answer, truth, capsys):
    assert check(answer, truth)
    assert capsys.readouterr().out == "Right.\n"


@pytest.mark.parametrize(
    ("answer", "truth", "said"),
    [
        (..., 100, "Not answered yet"),
        (None, 100, "Not answered yet"),
        (120, 100, "too large"),
        (80, 100, "too small"),
        (100 * 2**20, 100, "bytes were taken for MiB"),
        (100 * 2**30, 100, "bytes were taken for GiB"),
        (100 * 1024, 100, "one step of units too far"),
        (104.8576, 100, "10**6 and 2**20"),
        (107.374, 100, "10**9 and 2**30"),
        (800, 100, "bits and bytes"),
        ("many", 100, "A number is wanted"),
        (True, 1, "A number is wanted"),
        ("a", "b", "'a' is not it"),
        (1, True, "1 is not it"),
        (5, 0, "too large"),
        (np.int64(3), 2, "3 is too large"),
    ],
)
def test_wrong_answers_are_told_and_the_truth_is_kept(answer, truth, said, capsys):
    assert not check(answer, truth)
    assert said in capsys.readouterr().out


def test_the_tolerance_is_relative():
    assert check(110, 100, tolerance=0.1)
    assert not check(111.2, 100, tolerance=0.1)
