"""What stands for something else is listed, and is put back in reverse order."""

import math

import pytest

from memlab.trace.patches import replaced, replacements


def test_a_name_that_a_release_does_not_have_is_told():
    before = math.sin
    with pytest.raises(AttributeError, match="does not have the attribute 'sine'"):
        with replaced((math, "sin", None), (math, "sine", None)):
            pass
    assert math.sin is before and not replacements()
