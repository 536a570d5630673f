"""The page on accuracy: what other modules take from it, and what each CUDA rule changes."""

import numpy as np
import pytest
from notebook import Notebook

from memlab import Recipe, models
from memlab.card.kernels.rules import RULES
from memlab.card.step_time import ANCHORED
from memlab.libraries import import_bitsandbytes
from memlab.planner.choice import ALIKE
from memlab.predict.on_cpu import simulate_on_cpu

PAGE = Notebook("accuracy")
TINY = Recipe("bert-base-tiny", batch_size=8, seq_len=256)


@pytest.fixture(scope="module")
def page():
    return PAGE.run("imports rules-code")


def few_words():
    """A decoder whose logits are small, so that the peak lies in its layers."""
    config = models.config("llama-2-7b-tiny")
    config.vocab_size, config.bos_token_id, config.eos_token_id = 64, 1, 1
    return config


QLORA = Recipe(
    few_words(), seq_len=512, lora_rank=2, base="nf4", compute_dtype="fp16", upcast=False
)


@pytest.mark.parametrize(
    ("recipe", "changing"),
    [
        (TINY.but(attention="sdpa", optimizer="paged_adamw_8bit"), {"attention", "paged states"}),
        (TINY.but(precision="fp16-amp"), {"dropout", "autocast"}),
        (QLORA, {"softmax to fp32", "scratch of kernels"}),
    ],
    ids=["sdpa, paged", "autocast", "QLoRA"],
)
def test_the_rules_lead_from_the_cpu_to_the_card(page, recipe, changing):
    import_bitsandbytes("this test")
    rows = page["changes"](recipe, "T4")
    assert rows["the CPU's kernels"] == pytest.approx(
        simulate_on_cpu(recipe).peak_tensors, rel=1e-4
    )
    assert changing <= {name for name in RULES if rows[name]}
    assert rows["8-bit products"] == 0  # no recipe here meets it


def test_ratios_of_published_steps_are_as_near_as_the_planner_and_an_anchor_take_them():
    errors = PAGE.run("imports sources seconds-rows ratios")["ratios"]
    sizes = np.exp(np.abs(np.log1p(errors)))
    assert len(errors) > 1500 and np.percentile(sizes, 90) == pytest.approx(ANCHORED, abs=0.01)
    assert f"{errors.abs().median():.0%}" == f"{ALIKE:.0%}"
