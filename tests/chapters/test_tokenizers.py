"""Chapter 9: what its cells show is true, to the id, the token and the count."""

import random

import pytest
import torch
from notebook import Notebook

from memlab import Recipe, models, simulate
from memlab.book import corpora

NOTEBOOK = Notebook("09-tokenizers")
DEEPER = Notebook("09-tokenizers-deeper")
run = NOTEBOOK.run
PARTS = "imports corpus bpe parts steps template"
LOADERS = "vanilla changed"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models this small gain nothing from more, and lose much where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def chapter():
    given = {"__name__": "chapter", "device": torch.device("cpu")}
    return run(f"{PARTS} {LOADERS} python-tokenizer hostile", given)


@pytest.fixture(scope="module")
def deeper():
    cells = "imports corpus parts greedy by-hand hostile python-tokenizer"
    return DEEPER.run(cells, {"__name__": "deeper"})


def test_the_pipeline_of_parts_is_the_whole_tokenizer(chapter):
    for one in chapter["texts"][:50]:
        assert chapter["mine"].encode(one).ids == chapter["rust"](one)["input_ids"]


def test_every_step_of_the_sentence(chapter):
    assert chapter["sentence"].startswith("Pseudo-Vandermonde matrix")
    assert chapter["plain"] == chapter["sentence"].lower()
    words = [word for word, _ in chapter["words"]]
    assert words[:4] == ["pseudo", "-", "vandermonde", "matrix"]
    tokens = chapter["encoded"].tokens
    assert tokens[0] == "[CLS]" and tokens[-1] == "[SEP]"
    glued = "".join(t.removeprefix("##") for t in tokens[1:-1])
    assert glued == chapter["plain"].replace(" ", "")
    assert any(t.startswith("##") for t in tokens)
    assert [chapter["vocabulary"][t] for t in tokens] == chapter["encoded"].ids
    spans = chapter["encoded"].offsets[1:-1]
    for (start, end), token in zip(spans, tokens[1:-1], strict=True):
        assert chapter["plain"][start:end] == token.removeprefix("##")


@pytest.mark.parametrize("seed", [2])
def test_wordpiece_by_hand_gives_the_librarys_ids(chapter, deeper, seed):
    some = random.Random(seed).sample(chapter["texts"], 300) + chapter["hostile"](300, seed)
    some += deeper["chosen"]
    assert len(some) > 600
    expected = deeper["rust"](some)["input_ids"]
    assert [deeper["by_hand"](one) for one in some] == expected


def test_the_chosen_hostile_texts_are_what_they_are_meant_to_be(deeper):
    chapter = deeper
    chosen = chapter["chosen"]
    assert {"", " ", "\n", "x" * 100, "x" * 101, "y" * 5000, "a\0b", "a[SEP]b"} <= set(chosen)
    unknown = chapter["rust"].unk_token_id
    assert chapter["by_hand"]("x" * 101)[1:-1] == [unknown]
    assert unknown not in chapter["by_hand"]("x" * 100)
    assert chapter["by_hand"]("") == chapter["by_hand"](" \n") == [2, 3]


def test_greedy_has_no_way_back(deeper):
    wordpiece = deeper["wordpiece"]
    assert wordpiece("abc", {"a", "ab", "##bc"}) == ["[UNK]"]
    assert wordpiece("abc", {"a", "##bc"}) == ["a", "##bc"]
    assert wordpiece("aab", {"a", "##a", "##ab", "##b"}) == ["a", "##ab"]
    assert wordpiece("", {"a"}) == []


def test_both_tokenizers_agree_on_real_text_and_not_on_all_of_unicode(chapter, deeper):
    assert not chapter["python"].is_fast and chapter["rust"].is_fast
    assert all(chapter["equal_real"]) and len(chapter["equal_real"]) == 1000
    assert all(chapter["equal"]([one[:300] for one in chapter["texts"][2000:2600]]))
    agree = chapter["equal"](chapter["hostile"](300, seed=5))
    assert 100 < sum(agree) < 300
    DEEPER.run("causes", deeper)  # asserts that each of its three texts becomes different words
    assert len(deeper["rows"]) == 3 and r"\u03c2" in deeper["rows"][0][2]


@pytest.fixture(scope="module")
def trained(chapter):
    run("bpe-train smaller", chapter)
    return chapter


def test_a_smaller_bpe_is_the_one_that_would_have_been_trained(trained):
    fresh = trained["Tokenizer"](trained["BPE"]())
    fresh.pre_tokenizer = trained["bpe"].pre_tokenizer
    fresh.train_from_iterator(
        trained["texts"], trained["BpeTrainer"](vocab_size=600, **trained["given"])
    )
    cut = trained["smaller"](600)
    assert cut.get_vocab() == fresh.get_vocab()
    for one in trained["texts"][:50]:
        assert cut.encode(one).ids == fresh.encode(one).ids


def test_more_entries_make_fewer_tokens(trained):
    used = [len(trained["smaller"](n).encode(trained["stream"]).ids) for n in (512, 2048, 8192)]
    assert used[0] > 1.3 * used[1] > 1.3 * used[2]


@pytest.fixture(scope="module", autouse=True)
def long_text(chapter):
    chapter["stream"] = "\n".join(corpora.topics()["text"][:5])


def gpt2(entries):
    config = models.config("gpt2")
    config.vocab_size, config.n_layer = entries, 2  # the layers are not at stake
    config.bos_token_id = config.eos_token_id = 0
    shape = dict(batch_size=4, seq_len=1024)
    return Recipe(config, precision="fp16-amp", attention="sdpa", **shape)


@pytest.fixture(scope="module")
def formula(chapter):
    chapter["sizes"] = [2**15, 2**17]
    chapter["vocabularies"] = {f"{n:,}": simulate(gpt2(n)) for n in chapter["sizes"]}
    return run("vocabulary-formula", chapter)


def test_an_entry_of_the_vocabulary_costs_what_the_formula_says(formula, capsys):
    run("vocabulary-formula-check", formula)  # asserts it, and what is alive at the peak
    kinds = ["activations", "temporary", "temporary"]
    assert [life.category for life in formula["top"]] == kinds
    assert "formula 5,616 MiB" in capsys.readouterr().out


@pytest.mark.slow
def test_a_loss_in_parts_is_the_same_loss_in_less_memory(formula):
    run("linear-loss", formula)
    torch.manual_seed(0)
    states, table = torch.randn(64, 16), torch.randn(300, 16)
    ids = torch.randint(300, (64,))
    losses, slopes = [], []
    for parts in (False, True):
        mine = states.clone().requires_grad_()
        loss = formula["loss_of"](mine, table.clone().requires_grad_(), ids, parts)
        loss.backward()
        losses.append(loss.detach())
        slopes.append(mine.grad)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-6)
    run("linear-loss-peaks", formula | {"sizes": [2**15, 2**18]})  # asserts a third at most


def test_both_loaders_give_the_same_batches(chapter):
    run("same-batches", chapter)  # asserts that every tensor is equal
    assert len(chapter["prepared"]) == 256
    assert set(chapter["prepared"].column_names) == {"label", "input_ids", "attention_mask"}
    assert max(map(len, chapter["prepared"]["input_ids"])) == 128


def test_a_text_without_words_and_an_empty_data_set_are_refused(chapter):
    data = chapter["corpus"].select(range(3))
    bad = data.add_item({"text": " \n", "label": 0})
    with pytest.raises(ValueError, match=r"text 3 of the batch is ' \\n': allowed are texts with"):
        chapter["prepare"](bad, chapter["rust"], keep_in_memory=True)
    with pytest.raises(ValueError, match="the data set is empty: allowed are 1 text and more"):
        chapter["prepare"](data.select([]), chapter["rust"])


def test_map_finds_its_cached_file_and_not_that_of_another_tokenizer(deeper):
    deeper["corpus"] = deeper["corpus"].select(range(200))
    DEEPER.run("cache", deeper)  # asserts both
    assert deeper["first"]["input_ids"][:] == deeper["again"]["input_ids"][:]
    assert deeper["first"]["input_ids"][:] != deeper["other"]["input_ids"][:]
    assert len(list(deeper["folder"].glob("data/cache-*.arrow"))) == 2


def test_the_ids_of_both_tokenizers_train_alike(chapter):
    chapter["data"] = chapter["corpus"].select(range(48))
    run("trainer-run", chapter)
    assert len(chapter["losses"][True]) == 3 and chapter["losses"][True][0] > 0.5


def test_loss_a_token_and_bits_a_character_rank_two_vocabularies_differently(deeper):
    DEEPER.run("bits-coders bits-data", deeper)
    small, large = (deeper["bits"](deeper["learned_bpe"](n), seed=7) for n in (512, 2048))
    assert small[0] < large[0] and small[1] > large[1]


def test_only_what_the_assistant_says_is_trained(chapter):
    run("chat-template chat-masks chat-check", chapter)  # asserts that its end is, too
    turns = chapter["turns"] + [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "All axes agree."},
    ]
    chat = chapter["talk"].apply_chat_template(turns, **chapter["asked"])
    said = [i for i, mine in zip(chat["input_ids"], chat["assistant_masks"], strict=True) if mine]
    assert said.count(chapter["talk"].eos_token_id) == 2
    run("double-bos", chapter)  # asserts two against one


def test_only_a_child_told_to_use_threads_hangs(chapter):
    run("fork-script fork-run", chapter)
    assert [lines[-1] for lines in chapter["said"].values()] == [
        "the child came back",
        "the child hangs",
        "the child came back",
    ]


def test_without_a_post_processor_a_pair_is_one_text():
    fresh = DEEPER.run("imports corpus parts bare")  # asserts equal ids
    assert fresh["pair"].special_tokens_mask == [0] * 6
    DEEPER.run("bare-fixed", fresh)
    assert sum(fresh["pair"].special_tokens_mask) == 3
    assert fresh["pair"].type_ids[0] == 0 and fresh["pair"].type_ids[-1] == 1


def test_truncation_loses_the_end_and_windows_keep_it(chapter):
    run("end-run windows", chapter)
    lengths = [len(ids) for ids in chapter["rust"](chapter["marked"])["input_ids"]]
    assert chapter["lost"] == sum(n > 128 for n in lengths) > 50
    step = 128 - 2 - 16  # tokens that each further window adds
    rows = [1 + max(0, -(-(n - 128) // step)) for n in lengths]
    assert len(chapter["owners"]) == sum(rows)
    assert len(chapter["kept"]) == len(chapter["marked"])


def test_a_special_token_in_the_text_is_one_unless_told_otherwise(chapter):
    run("inject", chapter)  # asserts one [SEP] against two


def test_use_fast_is_ignored(chapter):
    run("use-fast", chapter)
    assert chapter["ignored"]


@pytest.mark.parametrize("number, wrong", [(1, 4), (2, 1907.0), (3, 2000)])
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(formula, capsys, number, wrong):
    chapter = run("use-fast", formula)
    cells = f"exercise-{number}-truth exercise-{number}"
    if number == 3:
        cells = "exercise-3-model exercise-3 exercise-3-truth exercise-3-check"
    run(cells, chapter)
    said = capsys.readouterr().out
    assert "Not answered yet" in said and (number != 3 or "index out of range" in said)
    run(f"solution-{number}", chapter)  # asserts that its own check passes
    last = NOTEBOOK.code[cells.split()[-1]]
    exec(last.replace("answer = ...", f"answer = {wrong!r}"), chapter)
    assert "Not yet" in capsys.readouterr().out
