import pytest
import torch

from memlab import SimulatedGPU


@pytest.fixture
def gpu():
    """The card without a limit inside which a test runs."""
    with SimulatedGPU() as card:
        yield card


@pytest.fixture
def on_card(gpu):
    """The same, on which a test's tensors lie unless it says where."""
    with torch.device("cuda"):
        yield gpu


@pytest.fixture
def t4():
    """The T4 inside which a test runs."""
    with SimulatedGPU("T4") as card:
        yield card
