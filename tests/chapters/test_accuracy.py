"""The page on accuracy: what other modules take from it."""

import numpy as np
import pytest
from notebook import Notebook

from memlab.card.step_time import ANCHORED
from memlab.planner.choice import ALIKE


def test_ratios_of_published_steps_are_as_near_as_the_planner_and_an_anchor_take_them():
    errors = Notebook("accuracy").run("imports sources seconds-rows ratios")["ratios"]
    sizes = np.exp(np.abs(np.log1p(errors)))
    assert len(errors) > 1500 and np.percentile(sizes, 90) == pytest.approx(ANCHORED, abs=0.01)
    assert f"{errors.abs().median():.0%}" == f"{ALIKE:.0%}"
