"""Chapter 10: what its cells show is true, and its batches are those that memlab simulates."""

import random

import pytest
import torch
from notebook import Notebook
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding
from transformers.trainer_pt_utils import LengthGroupedSampler

from memlab import SimulatedGPU

CHAPTER = Notebook("10-padding")
STRATEGIES = "cut orders grouped packed"
TEXTS = "corpus lengths"
COLLATORS = "vanilla-collate changed-collate"
SMALL = "classifier mean-of-each collate-rows learn-data learn-orders"
LENGTHS = [random.Random(i).randrange(1, 400) for i in range(331)]


@pytest.fixture(scope="module")
def plain():
    """The strategies alone, without texts."""
    return CHAPTER.run(f"imports {STRATEGIES}")


@pytest.fixture(scope="module")
def chapter():
    namespace = CHAPTER.run(f"imports {TEXTS} {STRATEGIES} one-a-row")
    namespace |= {"device": torch.device("cpu"), "SimulatedGPU": SimulatedGPU}
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
    CHAPTER.run(COLLATORS, chapter)
    texts = chapter["data"][:16]
    library = DataCollatorWithPadding(chapter["tokenizer"])([{"input_ids": t} for t in texts])
    ours = chapter["collate"](texts)
    assert set(ours) == set(library)
    for name, tensor in library.items():
        assert torch.equal(ours[name], tensor)
    fixed = chapter["collate_fixed"](texts)
    assert fixed["input_ids"].shape == (16, 512)
    assert fixed["attention_mask"].sum() == ours["attention_mask"].sum()


def test_an_empty_text_is_refused(chapter):
    CHAPTER.run(COLLATORS, chapter)
    with pytest.raises(ValueError, match="a text has no token"):
        chapter["collate"]([[1, 2], []])


def test_the_loader_computes_the_tokens_that_were_counted(chapter):
    CHAPTER.run(COLLATORS, chapter)
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


def test_the_worst_batch_in_a_loop_takes_what_its_recipe_takes(chapter):
    CHAPTER.run(f"{COLLATORS} own-loop", chapter)
    chapter["theirs"] = DataCollatorWithPadding(chapter["tokenizer"])
    texts = sorted(chapter["data"], key=len)[-200:-196]
    features = [{"input_ids": t, "labels": 0} for t in texts]
    recipe = chapter["Recipe"](
        "bert-base-tiny", batch_size=4, seq_len=len(texts[-1]), padded=True, attention="sdpa"
    )
    simulated = chapter["simulate"](recipe).peak_allocated
    assert chapter["loop_peak"]("bert-base-tiny", features) == simulated


def test_the_formula_of_operations_meets_the_counter(chapter):
    CHAPTER.run("flops flops-fit", chapter)
    assert abs(chapter["off"]) < 1e-3


@pytest.fixture(scope="module")
def small(chapter):
    chapter["LengthGroupedSampler"] = LengthGroupedSampler
    chapter["labels"] = chapter["corpus"]["label"][:]
    return CHAPTER.run(SMALL, chapter)


def test_padded_and_packed_texts_get_the_scores_of_the_text_alone(small):
    texts = small["train"][:9]
    model = small["Classifier"](16, 80, seed=1)
    alone = [model(**small["collate_rows"]([[0]], [text]))[0] for text in texts]
    padded = model(**small["collate_rows"]([[i] for i in range(9)], texts, 80))
    rows = small["packed"]([len(t) for t in texts], 80)
    packed = model(**small["collate_rows"](rows, texts))
    torch.testing.assert_close(padded, torch.stack(alone), rtol=1e-4, atol=1e-5)
    order = sum(rows, [])
    torch.testing.assert_close(packed, torch.stack(alone)[order], rtol=1e-4, atol=1e-5)


def test_fixed_and_dynamic_padding_are_the_same_training(small):
    CHAPTER.run("learn-strategies learn-function", small)

    def few(*a):
        return small["one_a_row"](small["shuffled"](*a)[:6])

    narrow, wide = (small["learn"](few, 0, 1, width)[1] for width in (None, 80))
    assert narrow == pytest.approx(wide, abs=1e-4)
    assert len(narrow) == 6 and narrow[0] > 1


@pytest.mark.slow
def test_sorting_hurts_and_grouping_does_not(small):
    CHAPTER.run("learn-strategies learn-function judge", small)
    kinds = ("shuffled", "sorted", "grouped, ours", "packed")
    results = {
        kind: [
            small["judge"](small["learn"](small["strategies"][kind], seed)[0]) for seed in (3, 4)
        ]
        for kind in kinds
    }
    losses = {kind: [loss for loss, _ in runs] for kind, runs in results.items()}
    assert min(losses["sorted"]) > max(losses["shuffled"])
    mean = sum(losses["sorted"]) / len(losses["sorted"])
    assert max(losses["grouped, ours"] + losses["packed"]) < mean - 0.05
    assert min(accuracy for _, accuracy in results["shuffled"]) > 0.7


def test_padding_without_a_mask_moves_the_answer_and_with_it_does_not(chapter):
    CHAPTER.run("mask-wrong mask-run", chapter)
    assert all(found > 1e-4 for found in chapter["drift"][1:])
    assert max(chapter["still"]) < 1e-5


def test_counted_padding_lowers_the_reported_loss_and_turns_the_gradient(chapter):
    chapter["topics"] = chapter["corpora"].topics()["text"][:]
    CHAPTER.run("loss-data loss-model loss-gradient loss-train", chapter)
    assert chapter["off"] > 0.5
    wrong, right = (
        [chapter["write"](chapter[name], seed)[0] for seed in (3, 4, 5)]
        for name in ("words", "right_labels")
    )
    assert max(wrong) + 0.5 < min(right)


def test_a_padding_token_that_is_the_end_of_text_takes_the_end_away(chapter):
    chapter["topics"] = chapter["corpora"].topics()["text"][:]
    CHAPTER.run("loss-data eos eos-run", chapter)
    assert chapter["ends"] == [0, 4]


def test_a_late_long_batch_runs_out_and_both_fixes_hold(chapter):
    chapter["theirs"] = DataCollatorWithPadding(chapter["tokenizer"])
    CHAPTER.run("late-data late-loop late-run late-first budget budget-run", chapter)
    assert 0 < chapter["late"][0] < len(chapter["order"])
    assert chapter["first"][0] == 0 and "CUDA out of memory" in chapter["first"][1]
    assert chapter["held_to"] == (len(chapter["budget"]), "the whole epoch")


def test_a_token_budget_holds_for_every_batch(chapter):
    CHAPTER.run("budget", chapter)
    batches = chapter["token_budget"](LENGTHS, 1000)
    assert sorted(sum(batches, [])) == list(range(len(LENGTHS)))
    assert max(len(b) * max(LENGTHS[i] for i in b) for b in batches) <= 1000
    with pytest.raises(ValueError, match="the budget is 50 tokens: the longest text has"):
        chapter["token_budget"](LENGTHS, 50)


def test_packed_texts_leak_unless_their_borders_are_told(chapter):
    CHAPTER.run("leak-data leak-function leak-run leak-blocks leak-bert-run", chapter)
    right = {"positions", "BERT, sdpa, yes and no", "BERT, sdpa, added", "BERT, eager, added"}
    for name, difference in chapter["leaks"].items():
        assert (difference < 1e-4) if name in right else (difference > 1e-3), name


def test_the_trainers_grouping_starts_with_the_widest_and_computes_less(chapter):
    CHAPTER.run(f"{COLLATORS} learn-data trainer-old trainer-rename trainer trainer-run", chapter)
    at_random, by_group = chapter["at_random"], chapter["by_group"]
    assert sum(by_group) < 0.95 * sum(at_random)
    assert by_group[0] == max(by_group) == max(at_random)


def test_accelerate_keeps_our_batches(chapter):
    CHAPTER.run(COLLATORS, chapter)
    names = ("DataLoader", DataLoader), ("ones", {"grouped": chapter["grouped"]})
    CHAPTER.run("plans trainer-old accelerate", chapter | dict(names))  # asserts its widths


@pytest.mark.parametrize("number, wrong", [(1, 0.3), (3, 12345)])
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(chapter, capsys, number, wrong):
    CHAPTER.run(COLLATORS, chapter)
    chapter["DataLoader"] = DataLoader
    sorted_tokens = tokens(chapter["by_length"](chapter["epoch"], 16), chapter["epoch"])
    chapter["table"] = {"tokens": {"sorted": sorted_tokens}}
    CHAPTER.check_exercise(number, wrong, chapter, capsys)
