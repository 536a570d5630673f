"""The guide's printed runs beside what is simulated of them."""

import pytest

from memlab.book import guide


def test_a_run_that_nobody_printed_is_refused():
    with pytest.raises(KeyError, match="nobody"):
        guide.guide_runs("nobody")
