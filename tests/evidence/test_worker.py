"""The process of one run: what it answers, and how it ends."""

import pytest

from memlab.evidence import worker


@pytest.mark.slow
def test_a_process_that_breaks_says_its_last_line():
    order = {"device": "cpu", "recipe": {"model": "gpt2-tiny", "colour": "red"}}
    answer = worker.ask(order, 300)
    assert "colour" in answer["failed"] and "\n" not in answer["failed"]
