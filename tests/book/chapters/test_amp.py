"""What autocast gives and keeps, and small trainings in its formats."""

import pytest
import torch

from memlab import Recipe
from memlab.book.chapters import amp_bytes


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_modules_under_autocast_give_what_cudas_list_says():
    gave = amp_bytes.formats_given()
    assert gave["Linear"] == ["float16"]
    assert gave["Embedding"] == gave["LayerNorm"] == ["float32"]
    assert gave["the loss"] == gave["every .grad"] == ["float32"]


def test_the_first_saving_batch_is_the_first_and_found_or_said_to_be_none():
    recipe = Recipe("bert-large", seq_len=512, set_to_none=False)
    assert amp_bytes.first_saving_batch(recipe.but(optimizer="adamw_torch_loop")) == 2
    with pytest.raises(ValueError, match="none of 1 to 99"):
        amp_bytes.first_saving_batch(recipe.but(seq_len=1))
