"""Scripts made from recipes: they are clean, they run, and they take what their recipe takes."""

import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import datasets
import pytest
import torch
from contents import ROOT
from helpers import refused
from transformers import AutoModelForCausalLM, AutoTokenizer

from memlab import Recipe, models, simulate
from memlab.book.corpora import tokenizer
from memlab.evidence.grid import recipe_of
from memlab.export.training_script import (
    APIS,
    OLDEST,
    api_of,
    pip_line,
    training_script,
)
from memlab.predict.script import run_script
from memlab.workloads.training import Training

CARD = "A100-40GB"
QLORA = "lora_rank=4 nf4 bf16-amp"
CHECKPOINTED_QLORA = f"{QLORA} checkpointing double_quant paged_adamw_8bit"
EVERYTHING = "bf16-amp adamw_torch_fused accumulation=2 checkpointing max_grad_norm=1.0 sdpa padded"

# Every value of every field that a script says occurs here, each with both APIs or with one: a
# model and what differs from a recipe's defaults, as in memlab/data/grid.txt.
KINDS = [
    ("bert-large", APIS),
    ("gpt2 bf16-amp max_grad_norm=1.0", APIS),
    ("gpt2 fp16-amp sdpa", APIS),
    ("gpt2 bf16 adamw_torch_fused", APIS),
    ("gpt2 expandable_segments", APIS),
    ("bert-large fp16 adamw_torch_loop", APIS),
    ("t5-3b checkpointing adafactor", APIS),
    ("t5-3b sgd freeze=embeddings,1", ["trainer"]),
    ("bert-large reentrant adamw_8bit", APIS),
    ("bert-large task=masked-lm lion_8bit", ["trainer"]),
    ("bert-large freeze=embeddings,1,pooler padded", ["accelerate"]),
    ("gpt2 accumulation=3 paged_adamw_8bit", APIS),
    ("gpt2 keep_gradients freeze=transformer.h.0.mlp", ["accelerate"]),
    ("gpt2 lora_rank=4 lora_targets=c_attn lora_dropout=0.1", APIS),
    ("gpt2 lora_rank=4 bf16 lora_half", ["accelerate"]),
    (f"bert-large {QLORA}", ["trainer"]),
    (f"t5-3b {QLORA}", ["accelerate"]),
    (f"t5-3b {QLORA} fp16-amp no_upcast", ["accelerate"]),
    (f"bert-large {QLORA} fp16-amp no_upcast", APIS),
    (f"qwen2.5-0.5b {CHECKPOINTED_QLORA}", APIS),
    (f"qwen2.5-0.5b {CHECKPOINTED_QLORA} bf16 no_upcast", APIS),
    (f"qwen2.5-0.5b task=sequence-classification {QLORA} no_upcast padded", ["accelerate"]),
    ("bert-large lora_rank=4 int8 fp16-amp", APIS),
    ("bert-large lora_rank=4 half fp16-amp", APIS),
    ("t5-3b lora_rank=4 half fp16-amp", ["accelerate"]),
    ("qwen2.5-0.5b lora_rank=4 half bf16-amp", ["trainer"]),
    ("bert-large task=masked-lm padded sdpa", ["accelerate"]),
    (f"qwen2.5-0.5b {EVERYTHING}", APIS),
    ("gpt2 step_in_backward adafactor", ["accelerate"]),
    ("gpt2 step_in_backward adamw_8bit freeze=1", ["accelerate"]),
    ("gpt2 bf16 adamw_torch_fused optimizer_offload=gradients", ["accelerate"]),
    ("gpt2 bf16 adamw_torch_fused optimizer_offload=states accumulation=2", ["accelerate"]),
    ("qwen2.5-0.5b chunked bf16 padded", ["accelerate"]),
    ("qwen2.5-0.5b linear_cross_entropy lora_rank=4", ["accelerate"]),
]
CASES = [(words, api) for words, apis in KINDS for api in apis]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """saved(model, task): a folder with the model's tiny twin and a tokenizer."""
    root = tmp_path_factory.mktemp("models")
    text = ["some text of a few words " * 20, "and more text than that " * 20]
    datasets.disable_progress_bars()

    def folder(model, task=None):
        path = root / f"{model}-{task}"
        if not path.exists():
            models.build(f"{model}-tiny", task).save_pretrained(path)
            kind = "wordpiece" if model.startswith("bert") else "bpe"
            tokenizer(text, vocab_size=512, kind=kind).save_pretrained(path)
        return str(path)

    yield folder
    datasets.enable_progress_bars()


@pytest.fixture
def a_recipe(saved):
    """a_recipe(words): of four sequences of 64 tokens, on a saved twin."""

    def made(words, size="4x64"):
        model, *rest = words.split()
        recipe = recipe_of(" ".join([model, size, *rest]))
        return recipe.but(model=saved(model, recipe.task), task=recipe.task)

    return made


def written(folder, recipe, api) -> Path:
    path = folder / f"train_{api}.py"
    path.write_text(training_script(recipe, api), encoding="utf-8")
    return path


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("words", "api"), CASES)
def test_a_script_takes_what_its_recipe_takes(words, api, a_recipe, tmp_path, monkeypatch):
    recipe = a_recipe(words)
    script = written(tmp_path, recipe, api)
    monkeypatch.chdir(tmp_path)
    # Of padded texts, some batch has one of full length and one that is not.
    ran = run_script(script, gpu=CARD, steps=4 if recipe.padded else 2).footprint
    wanted = simulate(recipe, CARD)
    more = ran.peak_tensors - wanted.peak_tensors
    # The loss of the step before, the Trainer's sum of losses, its count of tokens, the norm of
    # all gradients: a number each, and a block of 512 bytes.
    numbers = 8 * 4
    # Labels that are no longer the tokens themselves, masks of batches that are not at work;
    # Accelerate's loop has one batch on the card where the recipe has those of a step.
    batches = 3 * recipe.accumulation * recipe.batch_size * recipe.seq_len * 8
    # The Trainer's multi-tensor step takes two groups of weights, with and without decay, and
    # so copies the gradients of one after those of the other.
    two_groups = api == "trainer" and wanted.peak_phase == "optimizer step"
    less = 0.01 * wanted.peak_tensors if two_groups else 0
    # Accelerate copies what a model gives under autocast to fp32, of which T5's logits are in half
    # precision until then.
    halves = recipe.task == "seq2seq-lm" and recipe.precision.endswith("amp")
    vocabulary = models.config(recipe.model).vocab_size
    outputs = 4 * halves * recipe.batch_size * recipe.seq_len * vocabulary
    assert -batches - less <= more <= numbers + batches + outputs
    # A large block that is used again may have up to 1 MiB more than is asked for.
    unsplit = ran.breakdown["rounding"] - wanted.breakdown["rounding"]
    assert abs(unsplit) <= 2**20
    assert ran.breakdown["workspaces"] == wanted.breakdown["workspaces"]
    assert ran.peak_phase == wanted.peak_phase or (halves and ran.peak_phase == "forward")
    for category in ("gradients", "optimizer_states"):
        assert ran.breakdown[category] == wanted.breakdown[category]


def test_accelerates_plain_loop_is_the_recipes_to_the_byte(a_recipe, tmp_path, monkeypatch):
    recipe = a_recipe("bert-large bf16-amp")
    monkeypatch.chdir(tmp_path)
    ran = run_script(written(tmp_path, recipe, "accelerate"), gpu=CARD)
    assert ran.footprint.peak_allocated == simulate(recipe, CARD).peak_allocated


def test_scripts_are_clean_and_short(a_recipe, tmp_path):
    for number, (words, api) in enumerate(CASES):
        script = training_script(a_recipe(words), api)
        assert len(script.splitlines()) <= 120
        lines = [line for line in script.splitlines() if not line.startswith("MODEL = ")]
        assert max(map(len, lines)) <= 88
        assert "memlab" not in script
        compile(script, "script", "exec")
        (tmp_path / f"train_{number}.py").write_text(script, encoding="utf-8")
    settings = ROOT / "pyproject.toml"
    for command in (["check"], ["format", "--diff"]):
        run = [sys.executable, "-m", "ruff", *command, "--config", settings, "--no-cache", tmp_path]
        done = subprocess.run(run, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "api", "file"),
    [
        ("gpt2 bf16", "trainer", "model.safetensors"),
        ("t5-3b padded accumulation=2", "accelerate", "model.safetensors"),
        ("bert-large lora_rank=4", "trainer", "adapter_model.safetensors"),
    ],
)
def test_it_really_trains(words, api, file, a_recipe, tmp_path, monkeypatch, capsys):
    recipe = a_recipe(words, "4x16")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(written(tmp_path, recipe, api)), run_name="__main__")
    losses = [float(n) for n in re.findall(r"\bloss'?:? '?([\d.]+)", capsys.readouterr().out)]
    assert len(losses) >= 4 and all(0 < loss < 20 for loss in losses)
    assert (tmp_path / "output" / file).stat().st_size > 0
    AutoTokenizer.from_pretrained(tmp_path / "output")
    if words == "gpt2 bf16":
        assert losses[-1] < losses[0]
        AutoModelForCausalLM.from_pretrained(tmp_path / "output")


@pytest.mark.parametrize("api", APIS)
def test_rank_and_alpha_of_a_script_are_the_trainings(api):
    (own,) = Training(Recipe("gpt2-tiny", seq_len=16, lora_rank=4)).model.peft_config.values()
    script = training_script(Recipe("gpt2", lora_rank=4), api)
    assert re.findall(r"lora_alpha=(\d+)", script) == [str(own.lora_alpha)]
    assert re.findall(r"\br=(\d+)", script) == [str(own.r)]


def test_a_published_model_has_its_hub_name():
    script = training_script(Recipe("gpt2"))
    assert 'MODEL = "openai-community/gpt2"\n' in script


def test_a_config_file_stands_for_its_folder(saved):
    folder = saved("gpt2")
    script = training_script(Recipe(f"{folder}/config.json", seq_len=16))
    assert f"MODEL = {json.dumps(folder)}\n" in script


@pytest.mark.parametrize(
    ("recipe", "api", "said"),
    [
        (Recipe(models.config("gpt2")), "trainer", "model is a gpt2 config"),
        (Recipe("gpt2-tiny", seq_len=16), "trainer", "model is 'gpt2-tiny'"),
        (Recipe("gpt2"), "lightning", "api is 'lightning': allowed are trainer, accelerate"),
        (Recipe("gpt2", set_to_none=False), "trainer", "set_to_none is False"),
        (Recipe("gpt2", loss="chunked"), "trainer", "loss is 'chunked'"),
        (
            Recipe("gpt2", optimizer="adamw_torch_fused", optimizer_offload="states"),
            "trainer",
            "optimizer_offload is 'states'",
        ),
        (Recipe("gpt2", packed=True), "accelerate", "packed is True"),
        (Recipe("gpt2", ranks=2), "trainer", "ranks is 2"),
        (Recipe("t5-3b", precision="fp16"), "accelerate", "leaves wo of t5-3b in fp32"),
    ],
)
def test_what_cannot_be_said_is_refused_in_one_line(recipe, api, said):
    with refused(said):
        training_script(recipe, api)


def test_what_the_trainer_does_not_do_is_a_plain_loop():
    assert api_of(Recipe("gpt2")) == "trainer"
    for changes in ({"loss": "chunked"}, {"step_in_backward": True}):
        recipe = Recipe("gpt2", **changes)
        assert "accelerator.prepare" in training_script(recipe, api_of(recipe))


@pytest.mark.parametrize("api", APIS)
def test_what_loading_a_base_has_left_is_given_back(api, a_recipe, tmp_path, monkeypatch):
    """The Trainer does so by itself before its first step, and a recipe's training does."""
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    monkeypatch.chdir(tmp_path)
    recipe = a_recipe(f"qwen2.5-0.5b {QLORA} no_upcast")
    run_script(written(tmp_path, recipe, api), gpu=CARD, steps=1)
    assert emptied


def test_the_pip_line_names_what_is_imported():
    plain = pip_line(Recipe("gpt2"))
    assert re.findall(r'"([\w-]+)>=', plain) == ["accelerate", "datasets", "torch", "transformers"]
    whole = pip_line(recipe_of(f"gpt2 1x64 {QLORA}"), "accelerate")
    assert {"peft", "bitsandbytes"} <= set(re.findall(r'"([\w-]+)>=', whole))
    half = Recipe("gpt2", precision="bf16", attention="flash_attention_2")
    assert pip_line(half) == f"{plain} flash-attn"


def test_the_oldest_releases_are_memlabs_own():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    book = project["project"]["optional-dependencies"]["book"]
    bounds = dict(line.split(">=") for line in [*project["project"]["dependencies"], *book])
    assert OLDEST == {name: bounds[name] for name in OLDEST}
