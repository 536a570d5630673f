"""Chapter 9: its tokenizers give the libraries' ids."""

import random

import pytest
import torch
from notebook import Notebook
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding

import memlab
from memlab.book.chapters import tokenizing

NOTEBOOK = Notebook("09-tokenizers")
DEEPER = Notebook("09-tokenizers-deeper")
run = NOTEBOOK.run
PARTS = "imports corpus bpe parts template vanilla changed"


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
    some = random.Random(seed).sample(chapter["texts"], 300) + tokenizing.hostile(300, seed)
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
    cut = tokenizing.smaller(chapter["bpe"], 600)
    assert cut.get_vocab() == fresh.get_vocab()
    for one in chapter["texts"][:50]:
        assert cut.encode(one).ids == fresh.encode(one).ids


@pytest.mark.slow
def test_a_loss_in_parts_is_the_same_loss_in_less_memory(chapter):
    run("linear-loss", chapter)
    loss_of = chapter["loss_of"]
    torch.manual_seed(0)
    states, table = torch.randn(64, 16), torch.randn(300, 16)
    ids = torch.randint(300, (64,))
    losses, slopes = [], []
    for parts in (False, True):
        mine = states.clone().requires_grad_()
        loss = loss_of(mine, table.clone().requires_grad_(), ids, parts)
        loss.backward()
        losses.append(loss.detach())
        slopes.append(mine.grad)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-6)
    whole, split = (tokenizing.loss_peak(loss_of, 2**18, parts) for parts in (False, True))
    assert split < whole / 3


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
    trained = chapter["talk"].decode(chapter["ids"][chapter["said"] == 1])
    assert trained.replace(" ", "") == "Itissquare.</s>"  # its end is, too
    assert 0 < chapter["said"].sum() < len(chapter["said"])
    turns = chapter["turns"] + [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "All axes agree."},
    ]
    chat = chapter["talk"].apply_chat_template(turns, **chapter["asked"])
    said = [i for i, mine in zip(chat["input_ids"], chat["assistant_masks"], strict=True) if mine]
    assert said.count(chapter["talk"].eos_token_id) == 2
