"""The closed form against the simulation."""

import pytest
from helpers import assert_close

from memlab import Recipe, formula
from memlab.closed_form import coefficients
from memlab.gpus import find_gpu


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("bert-large", batch_size=4),
        Recipe("bert-base", batch_size=16, seq_len=128),  # the same coefficients
        Recipe("gpt2-xl", seq_len=512, precision="bf16", attention="sdpa", checkpointing=True),
    ],
)
def test_it_agrees_with_the_simulation(recipe):
    assert_close(recipe)


def test_the_card_decides_workspaces_and_context():
    recipe = Recipe("bert-large")
    small, large = formula(recipe, "T4"), formula(recipe, "H200")
    assert large.breakdown["workspaces"] > small.breakdown["workspaces"] > 0
    assert small.context == find_gpu("T4").context and formula(recipe).context is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer": "adamw_8bit"}, "optimizer 'adamw_8bit': the formula allows neither"),
        ({"lora_rank": 4, "base": "nf4"}, "base is 'nf4'"),
        ({"freeze": "embeddings,2"}, "freeze holds embeddings, 2"),
        ({"max_grad_norm": 1.0}, "max_grad_norm is 1.0: the formula allows 0"),
        ({"model": "mixtral-8x7b", "optimizer": "adafactor"}, "derive"),
    ],
)
def test_what_it_refuses(changes, said):
    with pytest.raises(ValueError, match=said) as error:
        formula(Recipe(**{"seq_len": 64} | changes))
    assert "\n" not in str(error.value)


def test_the_coefficients_are_plain():
    assert coefficients()
    for case in coefficients().values():
        for category, coefficient, powers in case["tensors"]:
            assert isinstance(category, str) and coefficient > 0
            assert all(isinstance(power, int) and power > 0 for power in powers.values())
        for moment in case["moments"]:
            assert moment["phase"] in ("forward", "backward", "optimizer step")
            assert all(first + 2**20 * more >= 0 for _, first, more in moment["counts"])
