"""Chapter 16: its QLoRA is the planner's, and the twelve questions have their answers."""

import json
from importlib import resources

import pytest
from notebook import Notebook, cells_of

from memlab import Recipe, find_gpu, fits
from memlab.planner.result import Question
from memlab.planner.space import Recipes

DATA = resources.files("memlab.data")
QUESTIONS = json.loads(DATA.joinpath("questions.json").read_text())["questions"]
ANSWERS = json.loads(DATA.joinpath("answers.json").read_text())["answers"]


chapter = cells_of("16-planner", "imports four-ways")


def test_the_plan_and_the_chapter_on_lora_mean_the_same_qlora(chapter):
    lora = Notebook("13-lora").run("imports settings recipes")
    qlora = chapter["four_ways"]("llama-3-8b")["QLoRA"]
    assert qlora.but(accumulation=1) == lora["qlora"].but(checkpointing=True)
    plan = Recipes(Question("llama-3-8b", 1024), find_gpu("RTX-4090"))
    options = [plan.recipe(one, 1) for one in plan.combinations if one.way == "qlora"]
    assert qlora.but(max_grad_norm=1.0) in options


# ---------------------------------------------------------------------- the twelve questions


@pytest.mark.sampled(1)
@pytest.mark.parametrize("title", ["GPT-2 345M on one V100 with 16 GB", "Llama-2 7B with QLoRA on"])
def test_what_is_kept_is_what_fits_says(title):
    (asked,) = [q for q in QUESTIONS if q["title"].startswith(title)]
    for size, kept in ANSWERS[asked["url"]].items():
        said = fits(Recipe(batch_size=int(size), **asked["recipe"]), asked["gpu"])
        assert said.footprint.peak_allocated == kept["peak_allocated_bytes"]
        assert bool(said) == kept["fits"] and said.total_memory == kept["total_memory_bytes"]
        # Reserved bytes shift with the order in which Python frees cycles of tensors.
        assert said.needed == pytest.approx(kept["needed_bytes"], rel=5e-3)
