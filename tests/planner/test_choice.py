"""Choices on tables of options."""

import pytest

from memlab import Recipe
from memlab.planner.choice import ALIKE, plainest
from memlab.planner.result import Option
from memlab.planner.space import Combination

GB, TOTAL = 10**9, 16 * 10**9


def options(*rows):
    """Combination -> option, of rows of (optimizer, bytes, seconds), the plainest first."""
    return dict(option("bf16-amp", *row) for row in rows)


def option(precision, optimizer, needed, seconds):
    """A combination and its option."""
    recipe = Recipe("gpt2-tiny", seq_len=16, precision=precision, optimizer=optimizer)
    one = Option(recipe, needed, GB, TOTAL, seconds)
    return Combination("full", precision, optimizer), one


def told_of(table):
    """The plainest of a table's combinations."""
    return plainest(list(table), lambda combination: table[combination].seconds)


@pytest.mark.parametrize(
    ("times", "told"),
    [
        ((1.0, 1.0), "adamw_torch"),
        ((1.0 + ALIKE, 1.0), "adamw_torch"),  # about as fast, and plainer
        ((1.0 + 1.1 * ALIKE, 1.0), "adafactor"),
        ((1.0, 2.0), "adamw_torch"),
    ],
)
def test_the_plainest_of_the_fastest_is_told(times, told):
    names = "adamw_torch", "adafactor"
    table = options(*((name, GB, time) for name, time in zip(names, times, strict=True)))
    assert told_of(table).optimizer == told


def test_what_pages_is_told_where_nothing_else_fits():
    table = options(("paged_adamw_8bit", GB, 0.1), ("adamw_8bit", GB, 9))
    assert told_of(table).optimizer == "adamw_8bit"
    assert told_of(options(("paged_adamw_8bit", GB, 1))).optimizer == "paged_adamw_8bit"


def test_fp32_is_told_where_nothing_in_fewer_bits_fits():
    quick, slow = option("fp32", "adamw_torch", GB, 1), option("bf16-amp", "adamw_torch", GB, 9)
    paged = option("bf16-amp", "paged_adamw_8bit", GB, 1)
    assert told_of(dict([quick, slow])).precision == "bf16-amp"
    assert told_of(dict([quick, paged])).precision == "fp32"


@pytest.mark.parametrize(
    ("changes", "tier"),
    [
        ({"precision": "bf16-amp"}, 1),
        ({"optimizer": "adamw_8bit"}, 2),
        ({"optimizer": "adafactor"}, 2),
        ({"lora_rank": 8, "optimizer": "adamw_8bit"}, 3),
        ({"lora_rank": 8, "base": "nf4", "precision": "bf16-amp"}, 4),
        ({"precision": "bf16"}, 5),
        ({"precision": "bf16", "lora_rank": 8}, 5),
        ({"optimizer": "sgd"}, 5),
    ],
)
def test_a_tier_is_what_may_cost_quality(changes, tier):
    assert Option(Recipe("gpt2-tiny", **changes), GB, GB, TOTAL, 1.0).tier == tier
