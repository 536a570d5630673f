import pytest

from memlab import SimulatedGPU


@pytest.fixture
def gpu():
    """The card without a limit inside which a test runs."""
    with SimulatedGPU() as card:
        yield card


@pytest.fixture
def t4():
    """The T4 inside which a test runs."""
    with SimulatedGPU("T4") as card:
        yield card
