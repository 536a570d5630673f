"""What stands for something else is listed, and is put back in reverse order."""

import math
import types

import pytest

from memlab.trace.patches import MISSING, Replacement, replaced, replacements


def test_names_stand_for_others_and_are_put_back():
    place = types.SimpleNamespace(one=1)
    with replaced((place, "one", 2)):
        with replaced((place, "one", 3), (place, "other", 4), create=True):
            assert (place.one, place.other) == (3, 4)
            assert replacements() == (
                Replacement(place, "one", 1),
                Replacement(place, "one", 2),
                Replacement(place, "other", MISSING),
            )
        assert place.one == 2 and not hasattr(place, "other")
    assert place.one == 1 and not replacements()


def test_a_name_that_a_release_does_not_have_is_told():
    before = math.sin
    with pytest.raises(AttributeError, match="does not have the attribute 'sine'"):
        with replaced((math, "sin", None), (math, "sine", None)):
            pass
    assert math.sin is before and not replacements()
