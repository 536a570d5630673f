"""What is written down for memlab gives the recipe back."""

import pytest
from helpers import refused

from memlab import Recipe, models
from memlab.export.memlab_lines import memlab_lines
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

    monkeypatch.setattr("memlab.simulate", only_ask, raising=False)
    with refused("enough"):
        exec(memlab_lines(recipe, gpu), {})
    assert asked == [(recipe, gpu)]


def test_only_what_is_not_the_default_is_said():
    nf4 = Recipe("gpt2", lora_rank=4, base="nf4", precision="bf16")
    lines = memlab_lines(nf4, "T4").splitlines()
    assert [line.partition("=")[0].strip() for line in lines if line.startswith("    ")] == [
        "model", "precision", "lora_rank", "base"
    ]  # fmt: skip


def test_a_config_has_a_name_in_python():
    recipe = Recipe(models.config("gpt2"), batch_size=3)
    lines = memlab_lines(recipe, "T4", "fits")
    assert lines.endswith('print(fits(recipe, gpu="T4"))\n')
    names = {"config": recipe.model}
    exec(lines.partition("print")[0], names)
    assert names["recipe"] == recipe
