"""The grid of runs: what is in it, and that a record of it survives whatever stops it."""

from helpers import refused

from memlab import Recipe
from memlab.evidence import grid
from memlab.evidence.records import find_records


def values(runs, field):
    return {getattr(recipe, field) for recipe in runs.values()}


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


def test_selection_by_words():
    runs = grid.grid_runs()
    chosen = grid.select(runs, "bert-large fp16-amp")
    assert chosen and all("bert-large" in n and "fp16-amp" in n for n in chosen)
    assert grid.select(runs, "") == runs
    with refused("'bert-huge'", "bert-large"):
        grid.select(runs, "bert-huge")
