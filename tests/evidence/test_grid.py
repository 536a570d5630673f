"""The grid of runs: what is in it, and that a record of it survives whatever stops it."""

import json

import pytest
from helpers import one_line

from memlab import Recipe, models
from memlab.evidence import grid
from memlab.evidence.records import find_records


def values(runs, field):
    return {getattr(recipe, field) for recipe in runs.values()}


def test_the_grid_is_wide():
    runs = grid.grid_runs()
    assert len(runs) >= 60
    assert len({json.dumps(run.as_dict()) for run in runs.values()}) == len(runs)
    assert values(runs, "precision") == {"fp32", "fp16-amp", "bf16-amp", "bf16"}
    assert values(runs, "attention") == {"eager", "sdpa"}
    assert values(runs, "checkpointing") >= {"none", "non-reentrant"}
    assert len(values(runs, "optimizer")) >= 5
    assert {128, 8192} <= values(runs, "seq_len") <= set(range(128, 8193))
    assert len(values(runs, "freeze")) >= 3 and len(values(runs, "lora_rank")) >= 3
    families = {models.config(recipe.model).model_type for recipe in runs.values()}
    assert {"bert", "distilbert", "deberta-v2", "gpt2", "llama", "qwen2", "t5"} <= families


def test_the_published_runs_are_in_it_at_their_real_size():
    runs = list(grid.grid_runs().values())
    for published in find_records("published", loop=""):
        assert Recipe(**published.recipe) in runs


def test_the_twins_are_the_same_grid():
    whole, tiny = grid.grid_runs(), grid.grid_runs(tiny=True)
    assert list(whole) == list(tiny)
    for name, recipe in tiny.items():
        assert recipe.model == f"{whole[name].model}-tiny"
        assert 32 <= recipe.seq_len <= 512
        assert all(part <= 1 for part in recipe.freeze if isinstance(part, int))  # of 2 layers
        assert len(recipe.freeze) == len(whole[name].freeze)
        same = {n: getattr(recipe, n) for n in ("seq_len", "model", "task", "freeze")}
        assert whole[name].but(**same) == recipe


def test_a_row_says_what_its_recipe_is():
    row = "llama-3.2-1b 2x2048 bf16 sdpa adafactor lora_rank=8 lora_dropout=0.1 checkpointing"
    assert grid.recipe_of(row) == Recipe(
        model="llama-3.2-1b",
        batch_size=2,
        seq_len=2048,
        precision="bf16",
        attention="sdpa",
        optimizer="adafactor",
        lora_rank=8,
        lora_dropout=0.1,
        checkpointing=True,
    )


def test_a_number_with_a_point_is_a_value():
    row = "gpt2 1x16 fp16 max_grad_norm=0.5 lora_rank=2 lora_dropout=0.25"
    recipe = grid.recipe_of(row)
    assert (recipe.precision, recipe.max_grad_norm, recipe.lora_dropout) == ("fp16", 0.5, 0.25)


def test_selection_by_words():
    runs = grid.grid_runs()
    chosen = grid.select(runs, "bert-large fp16-amp")
    assert chosen and all("bert-large" in n and "fp16-amp" in n for n in chosen)
    assert grid.select(runs, "") == runs
    with pytest.raises(ValueError) as error:
        grid.select(runs, "bert-huge")
    assert "'bert-huge'" in one_line(error) and "bert-large" in str(error.value)
