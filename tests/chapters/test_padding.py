"""Chapter 10: what its cells show is true, and its batches are those that memlab simulates."""

import dataclasses
import inspect
import random

import pytest
import torch
from accelerate import Accelerator
from notebook import Notebook
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding
from transformers.trainer_pt_utils import LengthGroupedSampler

import memlab
from memlab.book import corpora, small_config
from memlab.book.chapters import padding

CHAPTER = Notebook("10-padding")
DEEPER = Notebook("10-padding-deeper")
STRATEGIES = "orders grouped packed"
TEXTS = "corpus lengths"
COLLATOR = "changed-collate"
ORDERS = "shuffled", "grouped", "by_length"
LENGTHS = [random.Random(i).randrange(1, 400) for i in range(331)]


@pytest.fixture(scope="module")
def plain():
    """The strategies alone, without texts."""
    return CHAPTER.run(f"imports {STRATEGIES}", {"memlab": memlab})


@pytest.fixture(scope="module")
def chapter():
    namespace = {"memlab": memlab}
    CHAPTER.run(f"imports {TEXTS} {STRATEGIES} changed-collate", namespace)
    namespace |= {"device": torch.device("cpu"), "tiny": small_config("bert-base-tiny")}
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


def test_grouping_is_new_in_every_epoch_and_starts_with_the_longest(plain):
    one, two = (plain["grouped"](LENGTHS, 8, seed) for seed in (0, 1))
    assert one != two and one == plain["grouped"](LENGTHS, 8, 0)
    assert max(LENGTHS) in [LENGTHS[i] for i in one[0]]
    order = plain["by_length"](LENGTHS, 8)
    assert order == plain["by_length"](LENGTHS, 8, 1)  # in every epoch the same


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
    DEEPER.run("counted flops-fit", deeper)
    assert abs(deeper["off"]) < 1e-3


@pytest.fixture(scope="module")
def task(chapter):
    given = chapter["whole"][:700], chapter["corpus"]["label"][:], chapter["packages"]
    return padding.Task(chapter["tokenizer"], *given, chapter["collate"], "cpu")


def test_padded_texts_get_the_scores_of_the_text_alone(chapter, task):
    texts, model = task.texts[:9], padding.Reader(task.vocabulary, task.classes, seed=1)
    alone = [model(**chapter["collate"]([text]))[0] for text in texts]
    padded = model(**chapter["collate"](texts, 80))
    torch.testing.assert_close(padded, torch.stack(alone), rtol=1e-4, atol=1e-5)


def test_fixed_and_dynamic_padding_are_the_same_training(chapter, task):
    narrow, wide = (
        task.learn(chapter["shuffled"], 0, 1, width, steps=6)[1] for width in (None, 80)
    )
    assert narrow == pytest.approx(wide, abs=1e-4)
    assert len(narrow) == 6 and narrow[0] > 1


@pytest.mark.slow
def test_sorting_hurts(chapter, task):
    """The chapter's seeds, and others, each against its own shuffled run."""
    kinds = {n: chapter[f] for n, f in zip(("shuffled", "grouped", "sorted"), ORDERS, strict=True)}
    names = {"results": task.results(kinds, range(4))}
    CHAPTER.run("learn-words", names)
    assert names["sorting_hurts"]
    assert names["gaps"]["grouped"].mean() < names["gaps"]["sorted"].mean() / 2  # as the text says
    del kinds["grouped"]
    gaps = task.results(kinds, (4, 5, 6, 7)).diff(axis=1)["sorted"]
    assert gaps.mean() > 0.02 and (gaps > 0).sum() >= 3


def test_padding_without_a_mask_moves_the_answer_and_with_it_does_not(chapter):
    CHAPTER.run("mask-model", chapter)
    assert chapter["drift"]["no mask"] > 1e-4 > 1e-5 > chapter["drift"]["mask"]


@pytest.fixture(scope="module")
def paragraphs():
    return padding.Paragraphs(corpora.pages()["text"][:], "cpu")


@pytest.mark.slow
def test_counted_padding_lowers_the_reported_loss_and_turns_the_gradient(paragraphs):
    assert paragraphs.off() > 0.5
    wrong, right = (
        [paragraphs.write(kind, seed)[0] for seed in (3, 4, 5)] for kind in ("counted", "-100")
    )
    assert max(wrong) + 0.5 < min(right)


def test_a_padding_token_that_is_the_end_of_text_takes_the_end_away(paragraphs, capsys):
    CHAPTER.run("eos", {"paragraphs": paragraphs})
    ends = [line.split(": ")[1] for line in capsys.readouterr().out.splitlines()]
    assert ends == ["0 of 4 ends have a label", "4 of 4 ends have a label"]


def test_a_late_long_batch_runs_out_and_both_fixes_hold(chapter, capsys):
    CHAPTER.run("late-loop budget", chapter)
    late, first, twice, budget = capsys.readouterr().out.splitlines()
    assert int(late.split()[1]) > 0 and "CUDA out of memory" in late
    assert first.startswith("grouped, widest first: 0 CUDA out of memory")
    assert twice.startswith("87 x 512, twice: 1 CUDA out of memory")
    assert budget == "token budget: {0} the whole epoch ({0})".format(len(chapter["budget"]))


def test_a_token_budget_holds_for_every_batch(chapter):
    names = CHAPTER.run("budget", {"counts": [5], "survived": lambda _: ""})
    batches = names["token_budget"](LENGTHS, 1000)
    assert sorted(sum(batches, [])) == list(range(len(LENGTHS)))
    assert max(len(b) * max(LENGTHS[i] for i in b) for b in batches) <= 1000


def test_packed_texts_leak_unless_their_borders_are_told(chapter, deeper):
    leaks = CHAPTER.run("leak-run", chapter)["leaks"]
    right = {leaks.pop(name) for name in ("GPT-2, positions, no cache", "BERT, borders")}
    assert max(right) < 1e-4 < 1e-3 < min(leaks.values())
    DEEPER.run("leak-data leak-bert", deeper)
    for name, difference in deeper["leaks"].items():
        right = name != "eager, yes and no"
        assert (difference < 1e-4) if right else (difference > 1e-3), name


@pytest.mark.slow
def test_attention_of_variable_length_saves(chapter):
    CHAPTER.run("varlen-run varlen-words", chapter)
    peaks, pairs = chapter["tall"], chapter["compared"]
    assert list(peaks.values()) == sorted(peaks.values(), reverse=True)
    assert pairs["one row, borders"] == min(pairs.values())
    states = 12 * 109_482_240 / 2**20  # weights and two moments of BERT-base without its head
    assert states < peaks["one row, borders"] < 0.7 * peaks["padded"]


def test_accelerate_keeps_our_batches(chapter):
    plan = chapter["grouped"](chapter["epoch"], 16)
    loader = DataLoader(chapter["data"], batch_sampler=plan, collate_fn=chapter["collate"])
    prepared = Accelerator(cpu=True).prepare(loader)
    widths = [batch["input_ids"].shape[1] for batch in prepared]
    assert widths == [max(chapter["epoch"][i] for i in batch) for batch in plan]


@pytest.mark.parametrize("number, wrong", [(1, 0.3), (3, 12345)])
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(chapter, capsys, number, wrong):
    chapter["DataLoader"] = DataLoader
    CHAPTER.check_exercise(number, wrong, chapter, capsys)


@pytest.mark.parametrize("visible", [False, True])
@pytest.mark.parametrize("misleads, word", [(True, "holds"), (False, "does not hold")])
def test_a14_is_decided_by_what_counting_does_at_once(visible, misleads, word):
    """Not by thirty steps of a small model, whichever way they end."""
    assert CHAPTER.verdict("A14", {"visible": visible, "misleads": misleads}) == word


def test_trl_stops_padding_free_alone_at_its_default_length():
    trl = pytest.importorskip("trl")
    assert trl.SFTConfig.max_length == 1024
    assert "`max_length` is not enforced" in inspect.getsource(trl.SFTTrainer.__init__)
    assert "`ValueError` until you set `max_length=None`" in CHAPTER.text["trl-text"]


def test_which_tokens_trl_trains_is_as_told():
    trl = pytest.importorskip("trl")
    names = {field.name: field.default for field in dataclasses.fields(trl.SFTConfig)}
    assert names["completion_only_loss"] is None and names["assistant_only_loss"] is False
    by_data = 'completion_only_loss = "prompt" in dataset_sample and "completion" in dataset_sample'
    assert by_data in inspect.getsource(trl.SFTTrainer.__init__)


def test_a_packed_rows_mask_has_the_bytes_that_are_told():
    said = DEEPER.text["trl-words"]
    assert 1024**2 * 2 == 2 * 2**20 and "1,024² x 2 bytes = 2 MiB" in said
    assert 8192**2 * 2 == 128 * 2**20 and "128 MiB for 8,192" in said
