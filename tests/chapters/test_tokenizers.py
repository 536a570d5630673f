"""Chapter 9: its tokenizers give the libraries' ids."""

import random

import pytest
import torch
from notebook import Notebook
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding

import memlab

NOTEBOOK = Notebook("09-tokenizers")
DEEPER = Notebook("09-tokenizers-deeper")
run = NOTEBOOK.run
PARTS = "imports corpus bpe smaller parts vanilla changed python"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models this small gain nothing from more, and lose much where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def chapter():
    names = run(PARTS, {"__name__": "chapter", "memlab": memlab})
    return names | {"device": torch.device("cpu")}


@pytest.fixture(scope="module")
def deeper():
    cells = "imports corpus parts greedy by-hand hostile"
    return DEEPER.run(cells, {"__name__": "deeper", "memlab": memlab})


def test_the_pipeline_of_parts_is_the_whole_tokenizer(chapter):
    for one in chapter["texts"][:50]:
        assert chapter["mine"].encode(one).ids == chapter["rust"](one)["input_ids"]


@pytest.mark.parametrize("seed", [2])
def test_wordpiece_by_hand_gives_the_librarys_ids(chapter, deeper, seed):
    some = random.Random(seed).sample(chapter["texts"], 300) + chapter["hostile"](300, seed)
    some += deeper["chosen"]
    assert len(some) > 600
    expected = deeper["rust"](some)["input_ids"]
    assert [deeper["by_hand"](one) for one in some] == expected


def test_greedy_has_no_way_back(deeper):
    wordpiece = deeper["wordpiece"]
    assert wordpiece("abc", {"a", "ab", "##bc"}) == ["[UNK]"]
    assert wordpiece("abc", {"a", "##bc"}) == ["a", "##bc"]
    assert wordpiece("aab", {"a", "##a", "##ab", "##b"}) == ["a", "##ab"]
    assert wordpiece("", {"a"}) == []


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
    assert set(prepared.column_names) == {"label", "input_ids", "attention_mask"}
    assert max(map(len, prepared["input_ids"])) == 128
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
    assert 0 < chapter["by_assistant"].sum() < len(chapter["by_assistant"])
    turns = chapter["turns"] + [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "All axes agree."},
    ]
    chat = chapter["talk"].apply_chat_template(turns, **chapter["asked"])
    said = [i for i, mine in zip(chat["input_ids"], chat["assistant_masks"], strict=True) if mine]
    assert said.count(chapter["talk"].eos_token_id) == 2
