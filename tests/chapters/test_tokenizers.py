"""Chapter 9: what its cells show is true, to the id, the token and the count."""

import random

import pytest
import torch
from notebook import Notebook

from memlab import Recipe, models, simulate
from memlab.book import corpora

NOTEBOOK = Notebook("09-tokenizers")
run = NOTEBOOK.run
TWO = "imports corpus vocabulary-file python-tokenizer"
PARTS = "parts sentence steps template"
BY_HAND = "greedy by-hand hostile hostile-draw"
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
    given = {"device": torch.device("cpu"), "limit": 128, "size": 16}
    return run(f"{TWO} {PARTS} {BY_HAND} {LOADERS}", {"__name__": "chapter"} | given)


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
def test_wordpiece_by_hand_gives_the_librarys_ids(chapter, seed):
    some = random.Random(seed).sample(chapter["texts"], 300) + chapter["hostile"](300, seed)
    assert len(some) == 600
    expected = chapter["rust"](some)["input_ids"]
    assert [chapter["by_hand"](one) for one in some] == expected


def test_the_chosen_hostile_texts_are_what_they_are_meant_to_be(chapter):
    chosen = chapter["chosen"]
    assert {"", " ", "\n", "x" * 100, "x" * 101, "y" * 5000, "a\0b", "a[SEP]b"} <= set(chosen)
    unknown = chapter["rust"].unk_token_id
    assert chapter["by_hand"]("x" * 101)[1:-1] == [unknown]
    assert unknown not in chapter["by_hand"]("x" * 100)
    assert chapter["by_hand"]("") == chapter["by_hand"](" \n") == [2, 3]


def test_greedy_has_no_way_back(chapter):
    wordpiece = chapter["wordpiece"]
    assert wordpiece("abc", {"a", "ab", "##bc"}) == ["[UNK]"]
    assert wordpiece("abc", {"a", "##bc"}) == ["a", "##bc"]
    assert wordpiece("aab", {"a", "##a", "##ab", "##b"}) == ["a", "##ab"]
    assert wordpiece("", {"a"}) == []


def test_both_tokenizers_agree_on_real_text_and_not_on_all_of_unicode(chapter):
    run("same-ids", chapter)
    assert not chapter["python"].is_fast and chapter["rust"].is_fast
    assert all(chapter["equal"]([one[:300] for one in chapter["texts"][2000:2600]]))
    agree = chapter["equal"](chapter["hostile"](300, seed=5))
    assert 100 < sum(agree) < 300
    plain = chapter["plain"]
    run("causes", chapter)  # asserts that each of its three texts becomes different words
    chapter["plain"] = plain
    assert len(chapter["rows"]) == 3 and r"\u03c2" in chapter["rows"][0][2]


def test_offsets_and_truncation(chapter, capsys):
    run("offsets offsets-python truncation", chapter)
    assert "tokens 1 to 4 are: 'Pseudo'" in capsys.readouterr().out
    assert "offset_mapping" in chapter["inputs"] and "offset_mapping" not in chapter["without"]
    assert len(chapter["cut_ids"]) == 128 < len(chapter["whole_ids"])
    assert chapter["cut_ids"][-1] == chapter["rust"].sep_token_id


@pytest.fixture(scope="module")
def trained(chapter):
    run("bpe bpe-train merges smaller", chapter)
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
    run("vocabulary-top vocabulary-formula-check", formula)  # assert both
    kinds = ["activations", "temporary", "temporary"]
    assert [life.category for life in formula["top"]] == kinds
    assert "formula 5,616 MiB" in capsys.readouterr().out


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


def test_map_finds_its_cached_file_and_not_that_of_another_tokenizer(chapter):
    import datasets

    chapter |= {"some": chapter["corpus"].select(range(40)), "datasets": datasets}
    run("cache cache-other", chapter)  # asserts both
    assert chapter["first"]["input_ids"][:] == chapter["again"]["input_ids"][:]
    assert len(list(chapter["folder"].glob("data/cache-*.arrow"))) == 2


def test_the_ids_of_both_tokenizers_train_alike(chapter):
    chapter["data"] = chapter["corpus"].select(range(48))
    run("trainer-arguments trainer trainer-run", chapter)
    assert len(chapter["losses"][True]) == 3 and chapter["losses"][True][0] > 0.5


def test_loss_a_token_and_bits_a_character_rank_two_vocabularies_differently(trained):
    trained["unseen"] = corpora.docstrings("numpy", "validation")["text"][:12]
    run("bits-data bits-judge bits-train", trained)
    small, large = (trained["bits"](trained["smaller"](n), seed=7) for n in (512, 2048))
    assert small[0] < large[0] and small[1] > large[1]


def test_only_a_child_told_to_use_threads_hangs(chapter):
    chapter["mine"].post_processor = chapter["template"]
    run("fork-script fork-run", chapter)
    assert [lines[-1] for lines in chapter["said"].values()] == [
        "the child came back",
        "the child hangs",
        "the child came back",
    ]


def test_without_a_post_processor_a_pair_is_one_text(chapter):
    run("bare", chapter)  # asserts equal ids
    assert chapter["pair"].special_tokens_mask == [0] * 6
    run("bare-mended", chapter)
    assert sum(chapter["pair"].special_tokens_mask) == 3
    assert chapter["pair"].type_ids[0] == 0 and chapter["pair"].type_ids[-1] == 1


def test_truncation_loses_the_end_and_two_fixes_keep_it(chapter):
    run("end end-run from-left windows", chapter)  # asserts that both keep all
    lengths = [len(ids) for ids in chapter["rust"](chapter["marked"])["input_ids"]]
    assert chapter["lost"] == sum(n > 128 for n in lengths) > 50
    step = 128 - 2 - 16  # tokens that each further window adds
    rows = [1 + max(0, -(-(n - 128) // step)) for n in lengths]
    assert len(chapter["owners"]) == sum(rows)
    assert chapter["rust"].truncation_side == "right"


def test_a_text_longer_than_the_limit_is_named(chapter):
    run("refuse", chapter)
    refuse, rust = chapter["refuse_longer"], chapter["rust"]
    with pytest.raises(ValueError, match="text 1 has 12 tokens: allowed are 8, or windows"):
        refuse(["a b", "a b c d e f g h i j"], rust, 8)
    assert refuse(["a b", "a b c d e f"], rust, 8) == rust(["a b", "a b c d e f"])["input_ids"]


def test_a_special_token_in_the_text_is_one_unless_told_otherwise(chapter):
    run("inject", chapter)  # asserts one [SEP] against two


def test_use_fast_is_ignored(chapter):
    run("use-fast use-fast-names", chapter)
    assert chapter["ignored"] and chapter["BertTokenizer"] is chapter["BertTokenizerFast"]


@pytest.mark.parametrize("number, wrong", [(1, 4), (2, 1907.0), (3, 2000), (4, "Pseudo-")])
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(formula, capsys, number, wrong):
    chapter = run("use-fast", formula)
    cells = {3: "exercise-3-model exercise-3 exercise-3-check"}.get(number, f"exercise-{number}")
    run(cells, chapter)
    said = capsys.readouterr().out
    assert "Not answered yet" in said and (number != 3 or "index out of range" in said)
    run(f"solution-{number}", chapter)  # asserts that its own check passes
    last = NOTEBOOK.code[cells.split()[-1]]
    exec(last.replace("answer = ...", f"answer = {wrong!r}"), chapter)
    assert "Not yet" in capsys.readouterr().out
