import os
import sys
from pathlib import Path

import browser
import pytest

# Models this small gain nothing from more threads, and lose much where cores are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Traces of one session serve all of it, and never a reader's own.
os.environ.setdefault("MEMLAB_CACHE", str(Path(__file__).parent.parent / ".cache"))


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    """Of a `sampled(n)` test n cases, evenly spread, stay in `make test`; the others are slow."""
    matrices = {}
    for item in items:
        for marker in item.iter_markers("sampled"):
            cases = matrices.setdefault((item.path, item.originalname, marker.args[0]), [])
            cases.append(item)
    for (*_, most), cases in matrices.items():
        kept = {i * len(cases) // most for i in range(most)}
        for i, case in enumerate(cases):
            if i not in kept:
                case.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def libraries_forget():
    """What a library keeps for the whole process must not reach the next test."""
    state = sys.modules.get("accelerate.state")  # its settings; it refuses others
    if state:
        state.AcceleratorState._reset_state(reset_partial_state=True)
    bitsandbytes = sys.modules.get("bitsandbytes")  # overrides by id, and ids come again
    if bitsandbytes:
        bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()


@pytest.fixture
def attention_of_2_13(monkeypatch):
    """Kernels as before 2.14, whose memory-efficient one takes shared keys as they are."""
    from memlab.card.kernels import sdpa

    monkeypatch.setattr(sdpa, "SHARES_KEYS", sdpa.kernels_that_share_keys("2.13.0"))


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
