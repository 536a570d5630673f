"""Chapter 10: its plans hold every text, its batches and rows are the libraries' and memlab's."""

import random

import pytest
import torch
from notebook import Notebook, cells_of
from transformers import DataCollatorWithPadding

from memlab import models
from memlab.book import small_config

CHAPTER = Notebook("10-padding")
DEEPER = Notebook("10-padding-deeper")
ROWS = [[5, 6, 7], [8] * 9, [9, 10]]
LENGTHS = [random.Random(i).randrange(1, 400) for i in range(331)]


@pytest.fixture(scope="module")
def chapter():
    own = CHAPTER.run("imports corpus lengths orders grouped packed changed-collate budget",
                      {"survived": lambda plan: "", "counts": [5]})  # fmt: skip
    return own | {"data": [words[:512] for words in own["whole"][:64]]}


def tokens(batches):
    return sum(len(batch) * max(LENGTHS[i] for i in batch) for batch in batches)


def test_every_plan_has_every_text_once_and_wastes_less(chapter):
    plans = {name: chapter[name](LENGTHS, 8) for name in ("shuffled", "grouped", "by_length")}
    for batches in plans.values():
        assert {len(batch) for batch in batches} == {8, len(LENGTHS) % 8}
    plans["budget"] = chapter["token_budget"](LENGTHS, 1000)
    assert all(tokens([batch]) <= 1000 for batch in plans["budget"])
    rows = plans["packed"] = chapter["packed"](LENGTHS, 400)
    assert all(sum(LENGTHS[i] for i in row) <= 400 for row in rows)
    for batches in plans.values():
        assert sorted(sum(batches, [])) == list(range(len(LENGTHS)))
    taken = [400 * len(rows), *(tokens(plans[name]) for name in ("grouped", "shuffled"))]
    assert sum(LENGTHS) < tokens(plans["by_length"]) < taken[1] < 1.2 * sum(LENGTHS) < taken[2]
    assert taken[0] < 1.05 * sum(LENGTHS)
    # Groups are new in every epoch and start with the longest text.
    one, two = (chapter["grouped"](LENGTHS, 8, seed) for seed in (0, 1))
    assert one != two and max(LENGTHS) in [LENGTHS[i] for i in one[0]]


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


deeper = cells_of("10-padding-deeper", "imports corpus own-loop")


def test_the_worst_batch_in_a_loop_takes_what_its_recipe_takes(deeper):
    texts = sorted(deeper["data"], key=len)[-200:-196]
    features = [{"input_ids": t, "labels": 0} for t in texts]
    recipe = deeper["Recipe"](
        "bert-base-tiny", batch_size=4, seq_len=len(texts[-1]), padded=True, attention="sdpa"
    )
    simulated = deeper["simulate"](recipe).peak_allocated
    assert deeper["loop_peak"]("bert-base-tiny", features) == simulated


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
