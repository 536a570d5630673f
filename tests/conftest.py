import os
import sys

import browser
import pytest


@pytest.fixture(autouse=True)
def accelerate_forgets():
    """Accelerate keeps its settings for the whole process, and refuses others."""
    state = sys.modules.get("accelerate.state")
    if state:
        state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def chromium():
    """A headless Chromium without a network. In CI its absence is a failure, elsewhere a skip."""
    program = browser.executable()
    if program is None:
        why = f"no Chromium on this machine: {browser.HOW_TO_GET}"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    running = browser.Browser(program)
    yield running
    running.close()
