"""Chapter 10: its plans hold every text, its batches and rows are the libraries' and memlab's."""

import dataclasses
import inspect
import random

import pytest
import torch
from accelerate import Accelerator
from notebook import Notebook
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding

import memlab
from memlab import models
from memlab.book import small_config

CHAPTER = Notebook("10-padding")
DEEPER = Notebook("10-padding-deeper")
STRATEGIES = "orders grouped packed"
TEXTS = "corpus lengths"
ROWS = [[5, 6, 7], [8] * 9, [9, 10]]
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


@pytest.fixture(scope="module")
def deeper():
    return DEEPER.run("imports corpus own-loop")


def test_the_worst_batch_in_a_loop_takes_what_its_recipe_takes(deeper):
    texts = sorted(deeper["data"], key=len)[-200:-196]
    features = [{"input_ids": t, "labels": 0} for t in texts]
    recipe = deeper["Recipe"](
        "bert-base-tiny", batch_size=4, seq_len=len(texts[-1]), padded=True, attention="sdpa"
    )
    simulated = deeper["simulate"](recipe).peak_allocated
    assert deeper["loop_peak"]("bert-base-tiny", features) == simulated


def test_a_token_budget_holds_for_every_batch(chapter):
    names = CHAPTER.run("budget", {"counts": [5], "survived": lambda _: ""})
    batches = names["token_budget"](LENGTHS, 1000)
    assert sorted(sum(batches, [])) == list(range(len(LENGTHS)))
    assert max(len(b) * max(LENGTHS[i] for i in b) for b in batches) <= 1000


def test_accelerate_keeps_our_batches(chapter):
    plan = chapter["grouped"](chapter["epoch"], 16)
    loader = DataLoader(chapter["data"], batch_sampler=plan, collate_fn=chapter["collate"])
    prepared = Accelerator(cpu=True).prepare(loader)
    widths = [batch["input_ids"].shape[1] for batch in prepared]
    assert widths == [max(chapter["epoch"][i] for i in batch) for batch in plan]


def test_attention_of_variable_length_is_causal_in_a_decoder(deeper):
    """In one row with borders each text is read as alone, by an encoder and by a decoder."""
    DEEPER.run("leak-data", deeper)
    given = {"tiny": small_config("bert-base-tiny"), "texts": ROWS}
    DEEPER.run("text-by-text", deeper | given | {"flat": deeper["one_row"](ROWS)})
    decoder, row = models.build("gpt2-tiny", attention="sdpa").eval(), deeper["one_row"](ROWS)
    assert row["cu_seq_lens_q"].tolist() == [0, 3, 12, 14]
    row["use_cache"] = False
    with torch.no_grad():
        by_mask = decoder(**row).logits
        decoder.set_attn_implementation("text_by_text")
        torch.testing.assert_close(decoder(**row).logits, by_mask, rtol=1e-4, atol=1e-4)
    assert deeper["leak"](decoder, ROWS, **row) < 1e-4


def test_trl_lays_out_as_the_page_says(deeper):
    pytest.importorskip("trl")
    names = DEEPER.run("trl", deeper | {"display": str})
    texts = [[i % 50] * (30 + 17 * i % 400) for i in range(64)]
    table = names["trl_batches"](texts)
    free = {"ids": f"1 x {sum(map(len, texts[:16]))}", "it sends": "positions"}
    assert table["padding_free"] == free
    rows, width = map(int, table["packing"]["ids"].split(" x "))
    assert rows == 1 and 900 < width <= 1024 and table["packing"]["it sends"] == "positions"
    assert table["packing, wrapped"] == {"ids": "2 x 512", "it sends": "mask"}
    assert table["neither"]["ids"].startswith("16 x ")


def test_trl_stops_padding_free_alone_at_its_default_length():
    trl = pytest.importorskip("trl")
    assert trl.SFTConfig.max_length == 1024
    assert "`max_length` is not enforced" in inspect.getsource(trl.SFTTrainer.__init__)


def test_which_tokens_trl_trains_is_as_told():
    trl = pytest.importorskip("trl")
    names = {field.name: field.default for field in dataclasses.fields(trl.SFTConfig)}
    assert names["completion_only_loss"] is None and names["assistant_only_loss"] is False
    by_data = 'completion_only_loss = "prompt" in dataset_sample and "completion" in dataset_sample'
    assert by_data in inspect.getsource(trl.SFTTrainer.__init__)
