"""Chapter 10: what its cells show is true, and its batches are those that memlab simulates."""

import random

import pandas as pd
import pytest
import torch
from accelerate import Accelerator
from notebook import Notebook
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding
from transformers.trainer_pt_utils import LengthGroupedSampler

CHAPTER = Notebook("10-padding")
DEEPER = Notebook("10-padding-deeper")
STRATEGIES = "cut orders grouped packed"
TEXTS = "corpus lengths"
COLLATOR = "changed-collate"
ROWS = "leak-data one-row leak-texts leak-function"
LENGTHS = [random.Random(i).randrange(1, 400) for i in range(331)]


@pytest.fixture(scope="module")
def plain():
    """The strategies alone, without texts."""
    return CHAPTER.run(f"imports {STRATEGIES}")


@pytest.fixture(scope="module")
def chapter():
    namespace = CHAPTER.run(f"imports {TEXTS} {STRATEGIES} {COLLATOR} shapes")
    namespace |= {"device": torch.device("cpu")}
    namespace["ones"] = {"dynamic": namespace["shuffled"], "grouped": namespace["grouped"]}
    quiet = namespace["models"].config("bert-base-tiny")
    quiet.hidden_dropout_prob = quiet.attention_probs_dropout_prob = 0.0
    namespace["quiet"] = quiet
    namespace["data"] = [words[:512] for words in namespace["whole"][:1024]]
    return namespace


def tokens(batches, lengths):
    return sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)


@pytest.mark.parametrize("size", [1, 8, 16, 331])
@pytest.mark.parametrize("strategy", ["shuffled", "by_length", "grouped"])
def test_every_text_once_an_epoch(plain, strategy, size):
    batches = plain[strategy](LENGTHS, size)
    assert sorted(sum(batches, [])) == list(range(len(LENGTHS)))
    assert sorted({len(batch) for batch in batches}, reverse=True)[0] == size
    assert len(batches) == -(-len(LENGTHS) // size)


@pytest.mark.parametrize("size", [0, -1, 332])
@pytest.mark.parametrize("strategy", ["shuffled", "by_length", "grouped"])
def test_a_batch_larger_than_the_data_is_refused(plain, strategy, size):
    with pytest.raises(ValueError, match=f"batch size is {size}: allowed are 1 to 331"):
        plain[strategy](LENGTHS, size)


def test_grouping_is_new_in_every_epoch_and_starts_with_the_longest(plain):
    one, two = (plain["grouped"](LENGTHS, 8, seed) for seed in (0, 1))
    assert one != two and one == plain["grouped"](LENGTHS, 8, 0)
    assert max(LENGTHS) in [LENGTHS[i] for i in one[0]]
    order = plain["by_length"](LENGTHS, 8)
    assert order == plain["by_length"](LENGTHS, 8)


def test_tokens_of_the_strategies_are_in_order(plain):
    sorted_, grouped, mixed = (
        tokens(plain[name](LENGTHS, 8), LENGTHS) for name in ("by_length", "grouped", "shuffled")
    )
    assert sum(LENGTHS) <= sorted_ < grouped < mixed < len(LENGTHS) * max(LENGTHS)
    assert grouped < 1.2 * sum(LENGTHS) < mixed


def test_packed_rows_hold_every_text_once_and_are_full(plain):
    rows = plain["packed"](LENGTHS, 400)
    assert sorted(sum(rows, [])) == list(range(len(LENGTHS)))
    filled = [sum(LENGTHS[i] for i in row) for row in rows]
    assert max(filled) <= 400
    assert len(rows) * 400 < 1.05 * sum(LENGTHS)


def test_our_collator_gives_the_librarys_tensors(chapter):
    texts = chapter["data"][:16]
    library = DataCollatorWithPadding(chapter["tokenizer"])([{"input_ids": t} for t in texts])
    ours = chapter["collate"](texts)
    assert set(ours) == set(library)
    for name, tensor in library.items():
        assert torch.equal(ours[name], tensor)
    fixed = chapter["collate"](texts, 512)
    assert fixed["input_ids"].shape == (16, 512)
    assert fixed["attention_mask"].sum() == ours["attention_mask"].sum()


def test_an_empty_text_is_refused(chapter):
    with pytest.raises(ValueError, match="a text has no token"):
        chapter["collate"]([[1, 2], []])


def test_the_loader_computes_the_tokens_that_were_counted(chapter):
    epoch = chapter["epoch"]
    order = chapter["grouped"](epoch, 16)
    loader = DataLoader(chapter["data"], batch_sampler=order, collate_fn=chapter["collate"])
    assert sum(b["input_ids"].numel() for b in loader) == tokens(order, epoch)


def test_dynamic_padding_saves_little_here_and_grouping_most(chapter):
    epoch, size = chapter["epoch"], chapter["size"]
    fixed = len(epoch) * chapter["limit"]
    saved = {n: 1 - tokens(chapter[n](epoch, size), epoch) / fixed for n in ("shuffled", "grouped")}
    most = 1 - sum(epoch) / fixed
    assert saved["shuffled"] < 0.1
    assert 0.9 * most < saved["grouped"] <= most


def test_the_librarys_epoch_ends_with_short_texts_and_ours_does_not(chapter):
    epoch = chapter["epoch"]
    generator = torch.Generator().manual_seed(0)
    order = list(LengthGroupedSampler(16, lengths=epoch, generator=generator))
    assert epoch[order[0]] == max(epoch)
    assert max(epoch[i] for i in order[-16:]) < 40
    widths = [max(epoch[i] for i in batch) for batch in chapter["grouped"](epoch, 16)]
    rises = sum(b > a for a, b in zip(widths, widths[1:], strict=False))
    assert 0.3 < rises / len(widths) < 0.7


@pytest.fixture(scope="module")
def deeper():
    return DEEPER.run("imports corpus")


def test_the_worst_batch_in_a_loop_takes_what_its_recipe_takes(deeper):
    DEEPER.run("own-loop", deeper)
    texts = sorted(deeper["data"], key=len)[-200:-196]
    features = [{"input_ids": t, "labels": 0} for t in texts]
    recipe = deeper["Recipe"](
        "bert-base-tiny", batch_size=4, seq_len=len(texts[-1]), padded=True, attention="sdpa"
    )
    simulated = deeper["simulate"](recipe).peak_allocated
    assert deeper["loop_peak"]("bert-base-tiny", features) == simulated


def test_the_formula_of_operations_meets_the_counter(deeper):
    DEEPER.run("flops counted flops-fit", deeper)
    assert abs(deeper["off"]) < 1e-3


def test_the_formula_and_the_panels_coefficients_meet_the_simulation(chapter):
    CHAPTER.run("plans", chapter | {"Recipe": chapter["Recipe"]})
    shapes = [(16, 512), (5, 512)]
    chapter["bert"] = chapter["Recipe"]("bert-base", batch_size=16, attention="sdpa", padded=True)
    simulate = chapter["simulate"]
    chapter["peaks"] = {
        (r, w): simulate(chapter["bert"].but(batch_size=r, seq_len=w), gpu="T4") for r, w in shapes
    }
    chapter |= {"plans": {"all": shapes}, "where": ""}
    CHAPTER.run("epoch-memory explorer-memory", chapter)  # assert both
    memory, height = chapter["memory"], chapter["height"]
    for r, w in [(16, 61), (64, 64), (3, 300)]:
        linear = memory["fixed"] + r * w * (memory["token"] + w * memory["pair"])
        # The panel is a plane; what is left of segments that blocks share lies beside it.
        assert max(memory["least"], linear) == pytest.approx(height(r, w) * 2**30, rel=5e-3)


@pytest.fixture(scope="module")
def small(chapter):
    chapter["labels"] = chapter["corpus"]["label"][:]
    return CHAPTER.run("narrow learn-function", chapter)  # asserts that fixed is dynamic


def test_padded_texts_get_the_scores_of_the_text_alone(small):
    texts = small["train"][:9]
    model = small["Reader"](seed=1)
    alone = [model(**small["collate"]([text]))[0] for text in texts]
    padded = model(**small["collate"](texts, 80))
    torch.testing.assert_close(padded, torch.stack(alone), rtol=1e-4, atol=1e-5)


def test_fixed_and_dynamic_padding_are_the_same_training(small):
    narrow, wide = (
        small["learn"](small["shuffled"], 0, 1, width, steps=6)[1] for width in (None, 80)
    )
    assert narrow == pytest.approx(wide, abs=1e-4)
    assert len(narrow) == 6 and narrow[0] > 1


@pytest.mark.slow
def test_sorting_hurts(small):
    """Other seeds than the chapter's, each against its own shuffled run."""
    CHAPTER.run("judge learn-words", small)  # the chapter's own
    gaps = {name: gap.mean() for name, gap in small["gaps"].items()}
    assert small["sorting_hurts"] and gaps["grouped"] < gaps["sorted"] / 2  # as the text says
    judge, learn = small["judge"], small["learn"]
    results = {
        name: [judge(learn(small[name], seed)[0]) for seed in (4, 5, 6, 7)]
        for name in ("shuffled", "by_length")
    }
    gaps = [b - a for a, b in zip(*results.values(), strict=True)]
    assert sum(gaps) / 4 > 0.02 and sum(gap > 0 for gap in gaps) >= 3


def test_padding_without_a_mask_moves_the_answer_and_with_it_does_not(chapter):
    chapter["quiet"] = chapter["small_config"]("bert-base-tiny")
    CHAPTER.run("mask-model", chapter)
    assert all(found > 1e-4 for found in chapter["drift"][1:])
    assert max(chapter["still"]) < 1e-5


def test_counted_padding_lowers_the_reported_loss_and_turns_the_gradient(chapter):
    chapter["topics"] = chapter["corpora"].topics()["text"][:]
    CHAPTER.run("loss-data loss-model loss-words", chapter)  # asserts
    assert chapter["off"] > 0.5
    wrong, right = (
        [chapter["write"](chapter[name], seed)[0] for seed in (3, 4, 5)]
        for name in ("words", "right_labels")
    )
    assert max(wrong) + 0.5 < min(right)


def test_a_padding_token_that_is_the_end_of_text_takes_the_end_away(chapter):
    chapter["topics"] = chapter["corpora"].topics()["text"][:]
    CHAPTER.run("loss-data eos", chapter)
    assert chapter["ends"] == [0, 4]


def test_a_late_long_batch_runs_out_and_both_fixes_hold(chapter):
    chapter["theirs"] = DataCollatorWithPadding(chapter["tokenizer"])
    CHAPTER.run("late-data late-loop budget budget-run", chapter)
    assert chapter["late"][0] > 0 and "CUDA out of memory" in chapter["late"][1]
    assert chapter["first"][0] == 0 and "CUDA out of memory" in chapter["first"][1]
    assert chapter["held_to"] == (len(chapter["budget"]), "the whole epoch")


def test_a_token_budget_holds_for_every_batch(chapter):
    CHAPTER.run("budget", chapter)
    batches = chapter["token_budget"](LENGTHS, 1000)
    assert sorted(sum(batches, [])) == list(range(len(LENGTHS)))
    assert max(len(b) * max(LENGTHS[i] for i in b) for b in batches) <= 1000
    with pytest.raises(ValueError, match="the budget is 50 tokens: the longest text has"):
        chapter["token_budget"](LENGTHS, 50)


def test_packed_texts_leak_unless_their_borders_are_told(chapter, deeper):
    chapter["quiet"] = chapter["small_config"]("bert-base-tiny")
    CHAPTER.run(f"{ROWS} leak-run", chapter)  # asserts which of them leak
    leaks = chapter["leaks"]
    assert leaks.pop("GPT-2, positions, no cache") < 1e-4 < 1e-3 < min(leaks.values())
    DEEPER.run("leak-data leak-masks leak-bert", deeper)
    for name, difference in deeper["leaks"].items():
        right = name != "eager, yes and no"
        assert (difference < 1e-4) if right else (difference > 1e-3), name


def test_attention_of_variable_length_keeps_an_encoders_texts_apart_and_saves(chapter):
    chapter["quiet"] = chapter["small_config"]("bert-base-tiny")
    CHAPTER.run(
        f"{ROWS} leak-run varlen varlen-register varlen-run varlen-mask varlen-rows", chapter
    )
    assert chapter["leak"](chapter["encoder"], **chapter["flat"]) < 1e-4
    CHAPTER.run("varlen-peaks varlen-words", chapter)  # assert the order of the peaks
    states = 12 * 109_482_240 / 2**20  # weights and two moments of BERT-base without its head
    assert states < chapter["tall"]["one row, borders"] < 0.7 * chapter["tall"]["padded"]


def test_attention_of_variable_length_is_causal_in_a_decoder(chapter):
    CHAPTER.run(
        f"{ROWS} varlen varlen-register",
        chapter | {"encoder": chapter["models"].build("bert-base-tiny")},
    )
    decoder = chapter["models"].build("gpt2-tiny", attention="sdpa").eval()
    row = CHAPTER.run("leak-data one-row leak-texts", chapter)["flat"]
    with torch.no_grad():
        by_mask = decoder(**row).logits
        decoder.set_attn_implementation("text_by_text")
        torch.testing.assert_close(decoder(**row).logits, by_mask, rtol=1e-4, atol=1e-4)


def test_trl_lays_out_what_the_chapter_says(deeper):
    DEEPER.run("trl trl-run", deeper)
    table = {name: row for name, row in deeper["table"].items()}
    whole = sum(map(len, deeper["data"][:16]))
    assert table["padding_free"] == [f"1 x {whole}", "positions"]
    rows, width = map(int, table["packing"][0].split(" x "))
    assert rows == 1 and 900 < width <= 1024 and table["packing"][1] == "positions"
    assert table["packing, wrapped"] == ["2 x 512", "mask"]
    assert table["neither"][0].startswith("16 x ")


def test_the_trainers_grouping_starts_with_the_widest_and_computes_less(chapter):
    CHAPTER.run("trainer trainer-run", chapter)
    at_random, by_group = chapter["at_random"], chapter["by_group"]
    assert sum(by_group) < 0.95 * sum(at_random)
    assert by_group[0] == max(by_group) == max(at_random)


def test_accelerate_keeps_our_batches(chapter):
    plan = chapter["grouped"](chapter["epoch"], 16)
    loader = DataLoader(chapter["data"], batch_sampler=plan, collate_fn=chapter["collate"])
    prepared = Accelerator(cpu=True).prepare(loader)
    widths = [batch["input_ids"].shape[1] for batch in prepared]
    assert widths == [w for _, w in chapter["shapes"](plan)]


@pytest.mark.parametrize("number, wrong", [(1, 0.3), (3, 12345)])
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(chapter, capsys, number, wrong):
    chapter["DataLoader"] = DataLoader
    CHAPTER.check_exercise(number, wrong, chapter, capsys)


@pytest.mark.parametrize(
    "control, rounds, word",
    [
        ((1.05, 1.19), (1.0, 1.02), "within"),  # lies below the control, and inside the noise
        ((0.72, 1.02), (0.85, 0.89), "within"),
        ((1.05, 1.19), (0.3, 0.5), "more than"),
        ((0.98, 1.01), (1.05, 1.1), "more than"),
    ],
)
def test_a_ratio_of_times_is_told_by_how_far_the_control_is_off(control, rounds, word):
    rows = {"fixed again": control, "dynamic": rounds, "grouped": rounds}
    times = pd.DataFrame(rows, index=["lowest", "highest"]).T.assign(tokens=1.0, time=1.0)
    names = CHAPTER.run("time-words", {"times": times})
    assert f", {word} what the control is off" in names["told"]("dynamic")


@pytest.mark.parametrize("visible", [False, True])
@pytest.mark.parametrize("misleads, word", [(True, "holds"), (False, "does not hold")])
def test_a14_is_decided_by_what_counting_does_at_once(visible, misleads, word):
    """Not by thirty steps of a small model, whichever way they end."""
    assert CHAPTER.verdict("A14", {"visible": visible, "misleads": misleads}) == word
