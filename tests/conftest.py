import os

import browser
import pytest


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
