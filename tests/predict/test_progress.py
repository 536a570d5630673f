"""One line at a time, and none in the end."""

import sys
import weakref

import pytest

from memlab.predict.progress import Progress

SHOWN = {"delay": 0, "disable": False, "mininterval": 0}  # whatever TQDM_DISABLE says


@pytest.fixture(autouse=True)
def no_other_bar(monkeypatch):
    """No test before has left a bar open."""
    monkeypatch.setattr(Progress, "_instances", weakref.WeakSet(), raising=False)


def test_a_bar_is_wiped_out(capsys):
    for _ in Progress(range(3), "outer", **SHOWN):
        pass
    said = capsys.readouterr().err
    assert (
        "outer" in said and "\n" not in said and not said.rstrip("\r").rpartition("\r")[2].strip()
    )


def test_a_bar_inside_of_another_is_silent(capsys):
    with Progress(range(2), "outer", **SHOWN) as outer:
        for _ in outer:
            assert list(Progress(range(2), "inner", **SHOWN)) == [0, 1]
    assert "inner" not in capsys.readouterr().err


def test_after_an_error_the_next_one_is_shown(capsys):
    with pytest.raises(ValueError), Progress(range(2), "first", **SHOWN):
        raise ValueError
    list(Progress(range(2), "second", **SHOWN))
    assert "second" in capsys.readouterr().err


def test_a_quick_one_says_nothing(capsys):
    assert list(Progress(range(9), "quick", disable=False)) == list(range(9))
    assert capsys.readouterr().err == ""


def test_a_file_gets_no_lines(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert list(Progress(range(2), "piped", delay=0, mininterval=0)) == [0, 1]
    assert capsys.readouterr().err == ""
