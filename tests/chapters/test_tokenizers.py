"""Chapter 9: what its cells show is true, to the id, the token and the count."""

import random
from pathlib import Path

import pytest
import torch
from notebook import Notebook
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding

import memlab
from memlab import Recipe, models, simulate
from memlab.book import corpora
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


def test_every_step_of_the_words(chapter):
    mine, words = chapter["mine"], ["pseudo", "-", "vandermonde", "matrix"]
    plain = mine.normalizer.normalize_str(chapter["begins"])
    assert plain == chapter["begins"].lower()
    assert [word for word, _ in mine.pre_tokenizer.pre_tokenize_str(plain)] == words
    encoded = mine.encode(chapter["begins"])
    tokens = encoded.tokens
    assert tokens[0] == "[CLS]" and tokens[-1] == "[SEP]"
    assert "".join(t.removeprefix("##") for t in tokens[1:-1]) == plain.replace(" ", "")
    assert any(t.startswith("##") for t in tokens)
    assert [chapter["vocabulary"][t] for t in tokens] == encoded.ids
    for (start, end), token in zip(encoded.offsets[1:-1], tokens[1:-1], strict=True):
        assert plain[start:end] == token.removeprefix("##")


@pytest.mark.parametrize("seed", [2])
def test_wordpiece_by_hand_gives_the_librarys_ids(chapter, deeper, seed):
    some = random.Random(seed).sample(chapter["texts"], 300) + tokenizing.hostile(300, seed)
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
    run("same-ids", chapter)
    rust, python = chapter["rust"], chapter["python"]
    assert not python.is_fast and rust.is_fast
    assert all(chapter["equal_real"]) and len(chapter["equal_real"]) == 1000
    assert all(tokenizing.equal(rust, python, [one[:300] for one in chapter["texts"][2000:2600]]))
    assert 100 < sum(tokenizing.equal(rust, python, tokenizing.hostile(300, seed=5))) < 300
    rows = DEEPER.run("causes", deeper)["frame"].to_numpy()
    assert all(ours != theirs for _, ours, theirs in rows)
    assert len(rows) == 3 and r"\u03c2" in rows[0][2]


@pytest.fixture(scope="module")
def trained(chapter):
    return chapter


def test_a_smaller_bpe_is_the_one_that_would_have_been_trained(trained):
    fresh = trained["Tokenizer"](trained["BPE"]())
    fresh.pre_tokenizer = trained["bpe"].pre_tokenizer
    fresh.train_from_iterator(
        trained["texts"], trained["BpeTrainer"](vocab_size=600, **trained["given"])
    )
    cut = tokenizing.smaller(trained["bpe"], 600)
    assert cut.get_vocab() == fresh.get_vocab()
    for one in trained["texts"][:50]:
        assert cut.encode(one).ids == fresh.encode(one).ids


def test_more_entries_make_fewer_tokens(trained):
    stream = ["\n".join(corpora.pages()["text"][:5])]
    used = tokenizing.per_character(trained["bpe"], stream, (512, 2048, 8192)).tolist()
    assert used[0] > 1.3 * used[1] > 1.3 * used[2]


def gpt2(entries):
    config = models.config("gpt2")
    config.vocab_size, config.n_layer = entries, 2  # the layers are not at stake
    config.bos_token_id = config.eos_token_id = 0
    shape = dict(batch_size=4, seq_len=1024)
    return Recipe(config, precision="fp16-amp", attention="sdpa", **shape)


@pytest.fixture(scope="module")
def formula(chapter):
    return run("vocabulary-recipe vocabulary-formula", chapter)


def test_an_entry_of_the_vocabulary_costs_what_the_formula_says(formula):
    small, large = (simulate(gpt2(n)) for n in (2**15, 2**17))
    grown = large.peak_allocated - small.peak_allocated
    assert grown == pytest.approx((2**17 - 2**15) * formula["per_entry"], rel=1e-3)
    top = large.timeline.alive(large.timeline.peak)[:3]
    assert sum(life.nbytes for life in top) == 2**17 * formula["tokens"] * formula["logit"]
    assert [life.category for life in top] == ["activations", "temporary", "temporary"]


@pytest.mark.slow
def test_a_loss_in_parts_is_the_same_loss_in_less_memory(formula):
    run("linear-loss", formula)
    loss_of = formula["loss_of"]
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


def test_map_finds_its_cached_file_and_not_that_of_another_tokenizer(deeper, capsys):
    DEEPER.run("cache", deeper)
    assert capsys.readouterr().out.endswith("found: True; for another tokenizer: False\n")
    first, again, other = (deeper[n]["input_ids"][:] for n in ("first", "again", "other"))
    assert first == again != other
    assert len(list(Path(deeper["folder"]).glob("cache-*.arrow"))) == 2


def test_the_ids_of_both_tokenizers_train_alike(chapter, capsys):
    run("same-ids trainer-run", chapter)
    rust, python = (line.split()[1:] for line in capsys.readouterr().out.splitlines()[-2:])
    assert rust == python and len(rust) == 3 and float(rust[0]) > 0.5


def test_loss_a_token_and_bits_a_character_rank_two_vocabularies_differently(deeper):
    DEEPER.run("bits-coders", deeper)
    unseen = corpora.docstrings(deeper["packages"], "validation")["text"][:12]
    given = deeper["texts"][:20], unseen, 7, "cpu"
    small, large = (tokenizing.bits(deeper["learned_bpe"](n), *given) for n in (512, 2048))
    assert small[0] < large[0] and small[1] > large[1]


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
    run("double-bos", chapter)
    assert (chapter["twice"], chapter["once"].count(chapter["talk"].bos_token_id)) == (2, 1)


def test_only_a_child_told_to_use_threads_hangs(chapter):
    said = [tokenizing.forked(chapter["mine"], value) for value in (None, "true", "false")]
    assert said == ["the child came back", "the child hangs", "the child came back"]


def test_without_a_post_processor_a_pair_is_one_text():
    fresh = DEEPER.run("imports corpus parts bare")
    assert fresh["pair"].ids == fresh["joined"].ids
    assert fresh["pair"].special_tokens_mask == [0] * 6
    DEEPER.run("bare-fixed", fresh)
    assert sum(fresh["pair"].special_tokens_mask) == 3
    assert fresh["pair"].type_ids[0] == 0 and fresh["pair"].type_ids[-1] == 1


def test_truncation_loses_the_end_and_windows_keep_it(chapter):
    run("windows", chapter)
    lengths = [len(ids) for ids in chapter["rust"](chapter["marked"])["input_ids"]]
    kept, rows = chapter["with_end"](chapter["cut_off"]), chapter["windows"]["input_ids"]
    assert kept == sum(n <= 128 for n in lengths) < 350
    step = 128 - 2 - 16  # tokens that each further window adds
    assert len(rows) == sum(1 + max(0, -(-(n - 128) // step)) for n in lengths)
    assert chapter["with_end"](rows) >= len(lengths)  # the word may stand in two


def test_a_special_token_in_the_text_is_one_unless_told_otherwise(chapter):
    assert run("inject", chapter)["counted"] == [2, 1]


def test_use_fast_is_ignored(chapter):
    assert run("use-fast", chapter)["ignored"]


@pytest.mark.parametrize("number, wrong", [(1, 4), (2, 1907.0), (3, 2000)])
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(formula, capsys, number, wrong):
    chapter = run("use-fast", formula)
    cells = f"exercise-{number}-truth exercise-{number}"
    if number == 3:
        cells = "exercise-3 exercise-3-truth exercise-3-check"
    run(cells, chapter)
    said = capsys.readouterr().out
    assert "Not answered yet" in said and (number != 3 or "index out of range" in said)
    run(f"solution-{number}", chapter)  # asserts that its own check passes
    last = NOTEBOOK.code[cells.split()[-1]]
    exec(last.replace("answer = ...", f"answer = {wrong!r}"), chapter)
    assert "Not yet" in capsys.readouterr().out


def test_most_of_a_vocabulary_for_a_hundred_languages_is_embedding():
    config = models.config("xlm-roberta-base")
    rows = config.vocab_size * config.hidden_size
    with torch.device("meta"):
        weights = models.build("xlm-roberta-base", task="masked-lm").num_parameters()
    said = f"{rows / 1e6:.0f} of XLM-R base's {weights / 1e6:.0f} million"
    assert any(said in text for text in NOTEBOOK.text.values())
