"""The guide's printed runs beside what is simulated of them."""

import pytest

from memlab.book.chapters import published


def test_a_run_that_nobody_printed_is_refused():
    with pytest.raises(KeyError, match="nobody"):
        published.guide_runs("nobody")
