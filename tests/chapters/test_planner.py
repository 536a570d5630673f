"""Chapter 16: its QLoRA is the planner's."""

from notebook import Notebook, cells_of

from memlab import find_gpu
from memlab.planner.result import Question
from memlab.planner.space import Recipes

chapter = cells_of("16-planner", "imports four-ways")


def test_the_plan_and_the_chapter_on_lora_mean_the_same_qlora(chapter):
    lora = Notebook("13-lora").run("imports settings recipes")
    qlora = chapter["four_ways"]("llama-3-8b")["QLoRA"]
    assert qlora.but(accumulation=1) == lora["qlora"].but(checkpointing=True)
    plan = Recipes(Question("llama-3-8b", 1024), find_gpu("RTX-4090"))
    options = [plan.recipe(one, 1) for one in plan.combinations if one.way == "qlora"]
    assert qlora.but(max_grad_norm=1.0) in options
