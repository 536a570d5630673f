"""Chapter 9: its tokenizers give the libraries' ids."""

import random

import pytest
import torch
from notebook import Notebook, cells_of
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding

NOTEBOOK = Notebook("09-tokenizers")
run = NOTEBOOK.run


@pytest.fixture(scope="module")
def chapter():
    here = {"device": torch.device("cpu")}
    return run("imports corpus bpe smaller parts vanilla changed python") | here


deeper = cells_of("09-tokenizers-deeper", "imports corpus parts greedy by-hand hostile")


def test_the_pipeline_of_parts_is_the_whole_tokenizer(chapter):
    for one in chapter["texts"][:50]:
        assert chapter["mine"].encode(one).ids == chapter["rust"](one)["input_ids"]


def test_wordpiece_by_hand_gives_the_librarys_ids(chapter, deeper):
    some = random.Random(2).sample(chapter["texts"], 300) + chapter["hostile"](300, 2)
    some += deeper["chosen"]
    expected = deeper["rust"](some)["input_ids"]
    assert [deeper["by_hand"](one) for one in some] == expected
    assert deeper["wordpiece"]("abc", {"a", "ab", "##bc"}) == ["[UNK]"]  # greedy, no way back


def test_a_smaller_bpe_is_the_one_that_would_have_been_trained(chapter):
    fresh = chapter["Tokenizer"](chapter["BPE"]())
    fresh.pre_tokenizer = chapter["bpe"].pre_tokenizer
    fresh.train_from_iterator(
        chapter["texts"], chapter["BpeTrainer"](vocab_size=600, **chapter["given"])
    )
    cut = chapter["smaller"](chapter["bpe"], 600)
    assert cut.get_vocab() == fresh.get_vocab()
    for one in chapter["texts"][:50]:
        assert cut.encode(one).ids == fresh.encode(one).ids


def test_both_loaders_give_the_same_batches(chapter):
    data, prepared = chapter["corpus"].select(range(256)), chapter["prepared"]
    rust = chapter["rust"]

    def vanilla(rows):
        return chapter["collate_texts"](rows, rust)

    loaders = (data, vanilla), (prepared, DataCollatorWithPadding(rust))
    loaders = (DataLoader(rows, batch_size=16, collate_fn=collate) for rows, collate in loaders)
    for a, b in zip(*loaders, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_text_without_words_is_refused(chapter):
    bad = chapter["corpus"].select(range(3)).add_item({"text": " \n", "label": 0})
    with pytest.raises(ValueError, match=r"text 3 of the batch is ' \\n'"):
        chapter["prepare"](bad, chapter["rust"], keep_in_memory=True)


def test_only_what_the_assistant_says_is_trained(chapter):
    run("chat-template chat-masks", chapter)
    trained = chapter["talk"].decode(chapter["ids"][chapter["by_assistant"] == 1])
    assert trained.replace(" ", "") == "Itissquare.</s>"  # its end is, too
