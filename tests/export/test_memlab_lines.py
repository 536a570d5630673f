"""What is written down for memlab gives the recipe back."""

import shlex

import pytest
from helpers import one_line

from memlab import Recipe, cli, find_gpu, models
from memlab.export.memlab_lines import command_line, memlab_lines
from memlab.spec.serving import Serving

QLORA = {
    "lora_rank": 4,
    "base": "nf4",
    "precision": "bf16-amp",
    "checkpointing": True,
    "double_quant": True,
    "optimizer": "paged_adamw_8bit",
}
RECIPES = [
    (Recipe("gpt2"), "T4"),
    (Recipe("gpt2", batch_size=8, lora_rank=4, lora_targets="c_attn,c_proj"), None),
    (Recipe("bert-large", task="masked-lm", freeze=("embeddings", 2), padded=True), 2**34),
    (Recipe("gpt2", set_to_none=False, max_grad_norm=0.5), "A100-40GB"),
    (Recipe("llama-3.2-1b", **QLORA, compute_dtype="fp16", upcast=False), "T4"),
    (Serving("gpt2"), None),
    (Serving("t5-3b", weights="bf16", new_tokens=3, batch_size=9, cache="none"), "L4"),
    (Serving("gpt2", weights="nf4", compute_dtype="fp32", all_logits=True), 2**33),
]


@pytest.mark.parametrize(("recipe", "gpu"), RECIPES)
def test_memlabs_lines_give_the_recipe_back(recipe, gpu, monkeypatch):
    asked = []

    def only_ask(*said, **named):
        asked.append((said[0], named["gpu"] if named else (*said, None)[1]))
        raise ValueError("enough")

    monkeypatch.setattr("memlab.cli.simulate._on_card", lambda one, card, _: only_ask(one, card))
    monkeypatch.setattr("memlab.simulate", only_ask, raising=False)
    with pytest.raises(ValueError, match="enough"):
        exec(memlab_lines(recipe, gpu), {})
    program, *words = shlex.split(command_line(recipe, gpu))
    assert program == "memlab" and cli.main(words) == 2
    assert asked == [(recipe, gpu), (recipe, find_gpu(gpu))]


def test_only_what_is_not_the_default_is_said():
    assert command_line(Recipe("gpt2")) == "memlab simulate --model gpt2"
    nf4 = Recipe("gpt2", lora_rank=4, base="nf4", precision="bf16")
    assert command_line(nf4, "T4") == (
        "memlab simulate --model gpt2 --precision bf16 --lora-rank 4 --base nf4 --gpu T4"
    )


def test_a_config_has_a_name_in_python_and_none_in_a_command():
    recipe = Recipe(models.config("gpt2"), batch_size=3)
    lines = memlab_lines(recipe, "T4", "fits")
    assert lines.endswith('print(fits(recipe, gpu="T4"))\n')
    names = {"config": recipe.model}
    exec(lines.partition("print")[0], names)
    assert names["recipe"] == recipe
    with pytest.raises(ValueError) as error:
        command_line(recipe)
    assert "model is a gpt2 config" in one_line(error)
