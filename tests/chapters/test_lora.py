"""Chapter 13: what its cells show is true, and its adapters are those that memlab trains."""

import pytest
import torch
from notebook import Notebook, assert_same_run, traced

from memlab import Recipe, find_gpu, models, simulate
from memlab.book import small_config
from memlab.workloads.training import Training

CHAPTER = Notebook("13-lora")
DEEPER = Notebook("13-lora-deeper")
# Cells that train tiny models only, in the order of the chapter.
TINY = """imports whole-function adapter-weights lora-linear lora-start agree same-start agree-run
    merge trap trap-cases bits real-layer corpus fit pretrain full-change truncated rank-figure
    rates adapted"""


@pytest.fixture(scope="module")
def chapter():
    return CHAPTER.run(TINY, {"device": torch.device("cpu")})


@pytest.mark.parametrize("rank", [1, 8])
def test_the_shown_adapters_and_the_recipe_agree(chapter, rank):
    recipe = Recipe("llama-3-8b-tiny", batch_size=2, seq_len=32)
    shown, library = Training(recipe), Training(recipe.but(lora_rank=rank))
    shown.optimizer = chapter["lora_start"](shown.model, rank, chapter["LINEAR"])
    chapter["same_start"](shown.model, library.model)

    def shown_step():
        return chapter["train_step"](shown.model, shown.optimizer, shown.batches[0])

    assert_same_run(traced(shown, shown_step), traced(library, library.step))


def test_merge_equals_adapter_for_both(chapter):
    recipe = Recipe("llama-3-8b-tiny", batch_size=2, seq_len=32)
    shown, library = Training(recipe), Training(recipe.but(lora_rank=4))
    optimizer = chapter["lora_start"](shown.model, 4, chapter["LINEAR"])
    for start in (optimizer, library.optimizer):
        start.param_groups[0]["lr"] = 1e-2
    untouched = shown.model(**shown.batches[0]).logits
    for _ in range(3):
        chapter["train_step"](shown.model, optimizer, shown.batches[0])
        library.step()
    with torch.no_grad():
        before = [m(**shown.batches[0]).logits for m in (shown.model, library.model)]
        chapter["merge"](shown.model)
        after = [
            m(**shown.batches[0]).logits for m in (shown.model, library.model.merge_and_unload())
        ]
    assert (before[0] - untouched).abs().max() > 0.1
    torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-4)
    assert not any(isinstance(m, chapter["LoRALinear"]) for m in shown.model.modules())


def test_gradients_and_moments_are_the_adapters_only(chapter):
    CHAPTER.run("states", chapter)
    assert chapter["holds"] and all("lora_" in name for name in chapter["holds"])


def test_two_layers_tell_what_the_whole_model_takes(chapter):
    recipe = Recipe("llama-3-8b-tiny", seq_len=64, precision="bf16", lora_rank=4)
    recipe = recipe.but(checkpointing=True, lora_targets="q_proj,v_proj")
    deep = recipe.but(model=small_config(recipe.model, num_hidden_layers=3))
    by_layers, at_once = (run(deep, "L4") for run in (chapter["whole"], simulate))
    assert by_layers.trainable_parameters == at_once.trainable_parameters
    for name in ("parameters", "gradients", "optimizer_states", "activations"):
        assert by_layers.breakdown[name] == at_once.breakdown[name], name
    assert by_layers.peak_allocated == pytest.approx(at_once.peak_allocated, rel=1e-3)
    times = by_layers.step_seconds, at_once.step_seconds
    assert times[0].flops == times[1].flops
    assert times[0].expected == pytest.approx(times[1].expected, rel=0.01)
    assert sum(times[0].parts.values()) == pytest.approx(times[0].expected)


def test_adapter_weights_are_those_that_peft_makes(chapter):
    for targets in (None, ("q_proj", "v_proj")):
        recipe = Recipe("llama-3-8b-tiny", seq_len=16, lora_rank=4)
        recipe = recipe.but(lora_targets=targets or "all-linear")
        counted = chapter["adapter_weights"]("llama-3-8b-tiny", 4, targets)
        assert counted == Training(recipe).trainable_parameters


def test_lora_saves_gradients_and_states_and_no_activations():
    half = Recipe("llama-3-8b-tiny", batch_size=4, seq_len=128, precision="bf16", attention="sdpa")
    lora = half.but(lora_rank=4, lora_fp32=False)
    full, plain, fp32 = map(simulate, (half, lora, lora.but(lora_fp32=True)))
    least = plain.breakdown["activations"]
    assert least > 0.8 * max(full.timeline.levels["activations"])
    assert fp32.breakdown["activations"] > 1.2 * least
    assert plain.breakdown["optimizer_states"] < 0.1 * full.breakdown["optimizer_states"]


def test_reentrant_checkpointing_needs_an_input_that_asks(chapter):
    trapped = chapter["trapped"]
    assert "does not require grad" in trapped["causal-lm", "reentrant"]
    assert trapped["sequence-classification", "reentrant"].startswith("0 of")
    fixed = {said for (_, way), said in trapped.items() if way != "reentrant"}
    assert fixed == {"14 of 14 adapters have a gradient"}


def test_casting_what_is_not_quantized_makes_qlora_take_more_than_lora():
    lora = Recipe("llama-3.2-1b-tiny", batch_size=8, seq_len=128, precision="bf16")
    lora = lora.but(lora_rank=4, lora_fp32=False, attention="sdpa")
    quantized = lora.but(base="nf4", double_quant=True)
    plain, cast, fixed = map(simulate, (lora, quantized, quantized.but(upcast=False)))
    assert fixed.peak_allocated < plain.peak_allocated < cast.peak_allocated
    assert cast.breakdown["activations"] > 1.3 * fixed.breakdown["activations"]


@pytest.mark.slow
def test_each_piece_of_qlora_does_to_the_weights_what_the_figure_shows(chapter):
    lora = Recipe("llama-3.2-1b-tiny", batch_size=8, seq_len=128, precision="bf16")
    chapter["half"] = lora.but(lora_rank=4, lora_fp32=False, attention="sdpa")
    source = CHAPTER.code["pieces-recipes"].replace("llama-3.2-1b", "llama-3.2-1b-tiny")
    exec(source + "\n" + CHAPTER.code["pieces-run"], chapter)
    held = [run.breakdown["parameters"] for run in chapter["parts"].values()]
    plain, nf4, double, cast, bare, checkpointed = held
    assert double < nf4 < plain and double < cast == bare == checkpointed
    peaks = [run.peak_allocated for run in chapter["parts"].values()]
    assert peaks[2] < peaks[0] < peaks[3] < peaks[4] and peaks[5] < peaks[2]
    linear = sum(
        m.weight.numel()
        for name, m in models.build("llama-3.2-1b-tiny").named_modules()
        if isinstance(m, torch.nn.Linear) and name != "lm_head"
    )
    bits = chapter["stored"]
    saved = linear * (bits["NF4"] - bits["NF4, scales in 8 bits"]) / 8
    # Each layer has a table of 256 codes for its scales, an offset and last blocks that are short.
    assert saved - 14 * 1280 < nf4 - double < saved


@pytest.fixture(scope="module")
def deeper():
    return DEEPER.run("imports cast")


def test_preparing_for_k_bits_doubles_embedding_head_and_norms(deeper):
    source = DEEPER.code["cast-run"].replace('1b"', '1b-tiny"').replace('8b"', '8b-tiny"')
    exec(source.replace("lora_rank=16", "lora_rank=4"), deeper)
    cast = deeper["cast"]
    kinds = {name: {kind for n, kind in cast if n == name} for name, _ in cast}
    assert kinds["llama-3.2-1b-tiny"] == {"embed_tokens", "norms"}
    assert kinds["llama-3-8b-tiny"] == {"embed_tokens", "norms", "lm_head"}
    for held in cast.values():
        assert held["after"] == 2 * held["before"] > 0


def test_the_cast_takes_flash_away_and_leaves_math_up_to_pytorch_2_13(deeper):
    was, now = DEEPER.run("cast-routes", deeper)["routes"].values()
    assert was == "flash"
    assert now == ("math" if torch.__version__ < (2, 14) else "efficient")


def test_the_cast_changes_the_attention_kernel_without_autocast(deeper, capsys):
    deeper["nf4"] = Recipe("llama-3-8b-tiny", seq_len=16, precision="bf16", lora_rank=4).but(
        attention="sdpa", base="nf4", double_quant=True, upcast=False
    )
    DEEPER.run("kernels kernels-run", deeper)
    bare, autocast = capsys.readouterr().out.splitlines()[-2:]
    assert "flash" not in bare and "flash_attention" in autocast


@pytest.mark.slow
def test_the_paged_optimizer_pages_large_states_only():
    llama = Recipe("llama-3-8b", seq_len=16, precision="bf16", lora_rank=16)
    llama = llama.but(lora_targets="q_proj,v_proj")
    for rank, leaves in [(16, False), (32, True)]:  # 65,536 and 131,072 numbers in q's matrices
        recipe = llama.but(lora_rank=rank, optimizer="adamw_8bit")
        held, left = (
            simulate(one).breakdown["optimizer_states"]
            for one in (recipe, recipe.but(optimizer="paged_adamw_8bit"))
        )
        assert (left < held) == leaves


def test_lora_saves_a_third_of_the_operations_and_checkpointing_takes_time_for_it():
    full = Recipe("llama-3-8b-tiny", batch_size=4, seq_len=64, precision="bf16")
    config = models.config("llama-3-8b-tiny")
    config.vocab_size = 64  # so that the layers are most of the work, as in the large model
    full = full.but(model=config, attention="sdpa")
    lora = full.but(lora_rank=1, lora_fp32=False)
    recipes = full, lora, lora.but(checkpointing=True)
    whole, thin, again = (simulate(recipe, "L4").step_seconds for recipe in recipes)
    assert thin.flops / whole.flops == pytest.approx(2 / 3, abs=0.05)
    assert again.flops == pytest.approx(thin.flops, rel=0.05)  # what is repeated is no useful work
    assert again.expected > 1.1 * thin.expected


def test_bitsandbytes_stores_what_the_arithmetic_says(chapter):
    assert chapter["found_bits"] == pytest.approx(
        chapter["stored"]["NF4, scales in 8 bits"], abs=0.01
    )
    assert chapter["state"].blocksize == 64 and chapter["state"].state2.blocksize == 256
    assert 0.08 < chapter["error"] < 0.1


def test_most_of_a_change_lies_in_few_directions(chapter):
    CHAPTER.run("rank-words-2", chapter)  # asserts
    kept = dict(zip(chapter["ranks"], chapter["kept_gain"], strict=True))
    assert kept[1] < 0.6 < kept[8] < kept[16] < kept[64] == pytest.approx(1, abs=1e-3)
    of_change, by_chance = chapter["curves"].values()
    assert of_change[7] > 1.5 * by_chance[7]


@pytest.fixture(scope="module")
def learnt(chapter):
    """The comparison of the chapter with one seed instead of three and fewer settings."""
    for name in ("rank 64", "head"):
        chapter["rates"].pop(name, None)
    source = CHAPTER.code["learn-run"].partition("\nfig, ax")[0].replace("range(3)", "range(1)")
    exec(source, chapter)
    return {name: found[0] for name, found in chapter["gains"].items()}


def test_quality_rises_with_the_rank_and_qlora_learns_as_lora(learnt):
    reached = {name: gain / learnt["all"] for name, gain in learnt.items()}
    assert 0.15 < reached["rank 1"] < reached["rank 8"] < 1
    assert reached["QLoRA, rank 8"] == pytest.approx(reached["rank 8"], rel=0.1)


def test_merging_into_four_bits_makes_another_model(deeper):
    DEEPER.run("merge-load merge-adapt merge-4bit-run merge-gaps", deeper)
    into, written = deeper["gaps"].values()
    assert into > 5 * written


def test_with_alpha_twice_the_rank_a_step_grows_with_the_rank(chapter):
    CHAPTER.run("one-step one-step-table one-step-words", chapter)  # asserts
    small, _, large = (list(row.values()) for row in chapter["steps"].values())
    fixed, doubled, stabilized = (b / a for a, b in zip(small, large, strict=True))
    assert fixed == pytest.approx(1, abs=0.3)
    assert stabilized == pytest.approx(4, rel=0.4) and doubled > 8


@pytest.mark.parametrize("how", [{}, {"use_rslora": True}, {"use_dora": True}])
def test_relatives_of_lora_start_at_the_pretrained_model(chapter, how):
    CHAPTER.run("one-step", chapter)
    with torch.no_grad():
        ids = chapter["tiny_ids"]
        loss = models.build("llama-3-8b-tiny")(input_ids=ids, labels=ids).loss.item()
    assert chapter["moved"](4, 8, **how)[1] == pytest.approx(loss, abs=1e-4)


def test_dora_keeps_more_activations(chapter):
    CHAPTER.run("one-step dora dora-said", chapter)  # asserts
    assert chapter["dora_layer"] > 1.1 * chapter["plain_layer"]


def test_peft_passes_over_what_memlab_refuses(chapter, capsys):
    CHAPTER.run("wrong-names", chapter)
    assert chapter["peft_takes"](8, ["q_proj", "value_proj"]).startswith("['q_proj']")
    assert chapter["peft_takes"](512, ["q_proj"]).startswith("['q_proj']")
    for rank in (0, -1):
        with pytest.raises(ValueError, match="positive integer"):
            chapter["peft_takes"](rank, ["q_proj"])
    with pytest.raises(ValueError, match="not found in the base model"):
        chapter["peft_takes"](8, ["value_proj"])
    capsys.readouterr()
    CHAPTER.run("wrong-refused", chapter)
    target, large = capsys.readouterr().out.splitlines()
    assert "lora_targets holds value_proj" in target and "q_proj" in target
    assert "lora_rank is 512" in large and "up to 128" in large


def test_an_optimizer_made_first_moves_no_adapter(chapter):
    CHAPTER.run("late-optimizer", chapter)
    assert chapter["moves"][True] == (0, 0)
    moved, held = chapter["moves"][False]
    assert moved > 0.1 and held > 0


def test_the_trainer_and_accelerate_train_adapters(chapter):
    CHAPTER.run("trainer-run accelerate", chapter)
    lines = [p for n, p in chapter["model"].named_parameters() if "lora_B" in n]
    assert lines and all(p.norm() > 0 for p in lines)
    assert chapter["size"] < 2**20


@pytest.mark.parametrize("number, wrong", [(1, 5_767_168), (2, 1024), (3, "same")])
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(chapter, capsys, number, wrong):
    if number == 3:
        CHAPTER.run("buggy", chapter)
    CHAPTER.check_exercise(number, wrong, chapter, capsys)


def rows_of_table(text, heads):
    """The rows of the Markdown table with these heads: first cell -> the others, as numbers."""
    lines = text[text.index(heads) :].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: [float(cell) for cell in cells] for name, *cells in rows}


@pytest.mark.slow
def test_what_llama_factory_published_is_predicted_to_a_gigabyte():
    """Its loop of 2024 (src/llmtuner/model/patcher.py): double quantization, nothing cast."""
    card, text = find_gpu("A100-40GB"), CHAPTER.text["measure"]
    longer = models.resized(models.config("llama-2-7b"), max_position_embeddings=32768)
    nf4 = dict(base="nf4", double_quant=True, upcast=False)
    qlora = Recipe(
        longer,
        accumulation=4,
        precision="bf16-amp",
        optimizer="adamw_torch_fused",
        checkpointing=True,
        attention="sdpa",
        lora_rank=8,
        max_grad_norm=1.0,
        **nf4,
    )
    four = qlora.but(batch_size=4, seq_len=1024, accumulation=2)
    lora = four.but(base="half", double_quant=False, upcast=True)
    ways = [lora.but(attention="eager"), lora, four.but(attention="eager")]
    tables = {
        "| | 1,024 |": [qlora.but(seq_len=1024 * 2**i) for i in range(6)],
        "| | LoRA, eager": ways,
    }
    for heads, recipes in tables.items():
        rows = rows_of_table(text, heads)
        held = [simulate(recipe, card).peak_reserved + card.context for recipe in recipes]
        assert [round(one / 2**30, 1) for one in held] == rows["predicted"]
        assert rows["predicted"] == pytest.approx(rows["published"], abs=1.15)
