"""The formula against the simulation."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from helpers import assert_close

from memlab import MiB, Recipe, formula, models, simulate
from memlab.gpus import find_gpu
from memlab.predict.formula_blocks import blocks_of, rests_of, without_reuse
from memlab.predict.store import LIBRARIES
from memlab.trace.allocator import CachingAllocator

DATA = Path(__file__).parents[2] / "memlab" / "data"
NF4 = {"base": "nf4", "double_quant": True, "lora_rank": 16, "attention": "sdpa"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("bert-large", batch_size=4),
        Recipe("bert-base", batch_size=16, seq_len=128),  # the same trace
        Recipe("gpt2-xl", seq_len=512, precision="bf16", attention="sdpa", checkpointing=True),
        Recipe("llama-3.2-3b", seq_len=512, precision="bf16", **NF4),
        Recipe("llama-3-8b", seq_len=1024, precision="bf16", upcast=False, checkpointing=True,
               accumulation=2, **NF4),
        Recipe("bert-large", precision="fp16-amp", upcast=False, **NF4),
        Recipe("qwen2.5-1.5b", seq_len=256, precision="bf16-amp", optimizer="adamw_8bit",
               attention="sdpa", accumulation=4),
        Recipe("gpt2-medium", precision="fp16-amp", freeze="embeddings", attention="sdpa",
               optimizer="adafactor", seq_len=256),
    ],
    ids=str,
)  # fmt: skip
def test_it_agrees_with_the_simulation(recipe):
    assert_close(recipe, find_gpu("A100-80GB").without_limit())


# Three layers of Llama 3.2's and of GPT-2's structure.
SHARED = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
WHOLE = {"model_type": "gpt2", "n_layer": 3, "n_embd": 512, "n_head": 8, "n_positions": 4096,
         "vocab_size": 16384, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip


@pytest.mark.parametrize("gpu", ["T4", "L4"])
@pytest.mark.parametrize("model", [SHARED, WHOLE], ids=["shared keys", "own keys"])
@pytest.mark.parametrize("precision", ["fp32", "fp16-amp"])
def test_attention_takes_the_kernels_of_the_card(gpu, model, precision):
    """Cards before Ampere have no flash attention: they hold all weights where keys are shared."""
    recipe = Recipe(model, batch_size=2, seq_len=1024, precision=precision, attention="sdpa")
    assert_close(recipe, find_gpu(gpu).without_limit())


@pytest.mark.parametrize(("size", "gpu"), [(20, "T4"), (200, "L4")])
def test_heads_that_other_kernels_take_have_a_trace_of_their_own(size, gpu):
    model = WHOLE | {"n_embd": 8 * size, "n_layer": 4}
    recipe = Recipe(model, batch_size=2, seq_len=64, precision="fp16-amp", attention="sdpa")
    assert_close(recipe, find_gpu(gpu).without_limit())


def test_a_length_beyond_the_window_has_masks():
    model = SHARED | {"model_type": "mistral", "sliding_window": 100, "tie_word_embeddings": False}
    recipe = Recipe(model, batch_size=2, seq_len=256, attention="sdpa")
    assert_close(recipe, find_gpu("A100-80GB").without_limit())


def test_blocks_of_one_size_leave_the_rest_of_a_segment_to_the_last_one():
    """Weights of 1.125 MiB, 17 to a segment of 20 MiB: without its rest 3 % would be missing."""
    recipe = Recipe("bert-base", batch_size=3, seq_len=64, precision="bf16", checkpointing=True)
    card = find_gpu("A100-80GB").without_limit()
    exact, quick = simulate(recipe, card), formula(recipe, card)
    assert exact.breakdown["rounding"] > 0.02 * exact.peak_allocated
    assert quick.peak_allocated == pytest.approx(exact.peak_allocated, rel=0.015)


@pytest.mark.parametrize("seed", range(12))
def test_rests_are_those_of_an_allocator_that_is_given_the_largest_first(seed):
    """Of one size exactly; of several, a smaller one may find the rest of another segment."""
    draw = random.Random(seed)
    sizes = [draw.randrange(512, 12 * MiB, 512) for _ in range(draw.randrange(1, 6))]
    numbers = [draw.randrange(1, 60) for _ in sizes]
    shared = [(s, n) for s, n in zip(sizes, numbers, strict=True) if MiB < s < 10 * MiB]
    allocator = CachingAllocator(statistics=False)
    for size, number in sorted(shared, reverse=True):
        for _ in range(number):
            allocator.allocate(size)
    rests = allocator.allocated - sum(size * number for size, number in shared)
    found = rests_of(np.array(sizes), np.array(numbers))
    assert abs(found - rests) <= MiB * max(0, len(shared) - 1)


def test_the_card_decides_workspaces_and_context():
    recipe = Recipe("bert-large")
    small, large = formula(recipe, "T4"), formula(recipe, "H200")
    assert large.breakdown["workspaces"] > small.breakdown["workspaces"] > 0
    assert small.context == find_gpu("T4").context and formula(recipe).context is None


def test_what_has_no_pattern_of_layers_it_refuses():
    recipe = Recipe("gpt2", seq_len=64)
    with pytest.raises(ValueError, match="freeze holds embeddings, 2") as error:
        formula(recipe.but(freeze="embeddings,2"))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="no formula for .* simulate knows it"):
        formula(Recipe(WHOLE | {"n_embd": 160, "n_layer": 2}, seq_len=64, attention="sdpa"))


def test_a_config_json_of_the_hub_is_the_model_that_it_names(tmp_path):
    values = models.config("llama-3-8b").to_dict()
    # As published ones have it: the release, a class, fields of older releases.
    values |= {"architectures": ["LlamaForCausalLM"], "transformers_version": "4.40.0.dev0"}
    values |= {"gradient_checkpointing": False, "n_ctx": 8192, "position_embedding_type": "x"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    ways = {"precision": "bf16-amp", "attention": "sdpa", "seq_len": 64}
    assert formula(Recipe(str(path), **ways)) == formula(Recipe("llama-3-8b", **ways))


def pinned(name):
    pins = (Path(__file__).parents[2] / "requirements.txt").read_text()
    return re.search(rf"^{name}==(\S+)", pins, re.MULTILINE)[1]


def test_a_card_without_the_format_is_refused():
    with pytest.raises(ValueError, match="T4"):
        formula(Recipe("gpt2", seq_len=64, precision="bf16", attention="sdpa"), "T4")


def test_without_a_card_there_are_no_seconds_and_it_says_why():
    footprint = formula(Recipe("bert-large"))
    with pytest.raises(ValueError, match="name a card|no rates"):
        print(footprint.step_seconds)


def test_kept_answers_are_of_the_libraries_that_the_book_is_tested_with():
    """After an update tools/refresh.py makes them anew. (Of the kept predictions a sample is
    made anew in validation/test_loops.py.)"""
    versions = json.loads((DATA / "answers.json").read_text())["versions"]
    for name in LIBRARIES:
        assert versions[name].partition("+")[0] == pinned(name)


def test_segments_without_reuse_hold_the_most_of_every_size():
    """Blocks of exactly 1 and 10 MiB are a small and a large one; segments are never shared.

    The largest that comes and goes may be split, and is asked for once more.
    """
    blocks = np.array([MiB, MiB, 5 * MiB, 10 * MiB, 13 * MiB])
    counts = np.array([[1, 2, 0, 1, 0], [1, 0, 5, 0, 1]])
    small, medium, large = 4 * MiB, 40 * MiB, (10 + 14) * MiB
    assert without_reuse(blocks, counts) == small + medium + large + 14 * MiB
    assert without_reuse(blocks, counts[:1]) == 4 * MiB + 10 * MiB  # nothing comes or goes


def test_blocks_of_segments_that_grow_leave_no_rests():
    sizes = np.array([100.0, MiB + 1, 11.5 * MiB])
    assert blocks_of(sizes).tolist() == [512, MiB + 512, 12 * MiB]
    assert blocks_of(sizes, grow=True).tolist() == [512, MiB + 512, 11.5 * MiB]


def test_a_formula_of_segments_that_grow_is_that_of_a_simulation():
    recipe = Recipe("bert-base", batch_size=3, seq_len=64, precision="bf16", checkpointing=True)
    recipe, card = recipe.but(expandable_segments=True), find_gpu("A100-80GB").without_limit()
    exact, quick = simulate(recipe, card), formula(recipe, card)
    assert quick.peak_allocated == pytest.approx(exact.peak_allocated, rel=0.001)
    low, high = quick.reserved_range
    assert low <= exact.peak_reserved <= high
