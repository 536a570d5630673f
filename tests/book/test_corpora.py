"""Offline text: deterministic corpora, stable splits, tokenizers trained on the spot."""

import hashlib
import importlib.metadata
import json
import subprocess
import sys

import pytest
from tokenizers import normalizers, pre_tokenizers

from memlab.book import corpora


@pytest.fixture(scope="module")
def corpus():
    return corpora.docstrings("datasets", split="all")


def one_line(error) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def content_hash(dataset) -> str:
    """Hexadecimal SHA-256 of a data set's texts and labels, in their order."""
    names, digest = dataset.features["label"].names, hashlib.sha256()
    for row in dataset:
        digest.update(f"{names[row['label']]}\0{row['text']}\0".encode())
    return digest.hexdigest()


def test_docstrings_are_those_of_the_pinned_packages():
    """Python files of a release are the same everywhere, so their docstrings have a known hash."""
    pinned = {"transformers": "5.24.0", "datasets": "5.2.0"}
    installed = {name: importlib.metadata.version(name) for name in pinned}
    if installed != pinned:
        pytest.skip(f"the hash is of {pinned}, installed are {installed}")
    data = corpora.docstrings(pinned, split="all")
    assert data.features["label"].names == ["transformers", "datasets"]
    assert len(data) == 9932
    assert content_hash(data) == (
        "bab16d2d661aacf1fc2b7dfab6bcbf3546ccbd3f744ba44d3c6b8568ef460417"
    )


def test_the_pages_never_change():
    """What small models have learnt from them, and the figures in the text, hang on it."""
    assert content_hash(corpora.pages()) == (
        "7698a9a00e0f5d95188a7ece2b2db98f8a5bfba0ddda1e75b3464d09aaadcb9a"
    )


def test_corpora_are_unique_labelled_and_long_enough(corpus):
    for data in (corpus, corpora.pages()):
        assert data.column_names == ["text", "label"]
        assert len(set(data["text"])) == len(data)
        assert min(len(words.split()) for words in data["text"]) >= 8
        assert set(data["label"]) <= set(range(data.features["label"].num_classes))
    assert 0 < len(corpora.docstrings("datasets", "all", min_words=40)) < len(corpus)
    assert len(corpora.pages()) == 40
    assert max(len(words.split()) for words in corpora.pages()["text"]) > 1000


def test_nothing_is_imported_and_nothing_is_cached_on_disk(corpus, tmp_path, monkeypatch):
    assert corpus.cache_files == []
    package = tmp_path / "raises_on_import"
    package.mkdir()
    words = "one two three four five six seven eight"
    (package / "__init__.py").write_text(f'raise RuntimeError\n\n\ndef f(x):\n    """{words}"""\n')
    monkeypatch.syspath_prepend(tmp_path)
    assert corpora.docstrings("raises_on_import", "all")[:] == {"text": [words], "label": [0]}


def test_a_text_stays_in_its_split(corpus):
    parts = {name: corpora.docstrings("datasets", name)["text"] for name in corpora.SPLITS[:3]}
    assert sorted(sum(map(list, parts.values()), [])) == sorted(corpus["text"])
    assert 0.75 < len(parts["train"]) / len(corpus) < 0.85
    longer = corpora.docstrings("datasets", "test", min_words=40)["text"]
    assert set(longer) <= set(parts["test"])
    wider = corpora.docstrings(["datasets", "numpy"], "validation")["text"]
    assert set(parts["validation"]) <= set(wider)


def test_content_hash_sees_texts_labels_and_order(corpus):
    first = corpus.select([0, 1])
    assert content_hash(first) == content_hash(corpus.select([0, 1]))
    assert content_hash(first) != content_hash(corpus.select([1, 0]))
    assert content_hash(first) != content_hash(corpus.select([0]))


def test_wordpiece(corpus):
    trained = corpora.tokenizer(corpus["text"], vocab_size=1000)
    assert len(trained) == 1000
    encoded = trained("Returns the DATASET.", "Second")
    tokens = trained.convert_ids_to_tokens(encoded["input_ids"])
    assert tokens[0] == "[CLS]"
    assert tokens.count("[SEP]") == 2
    assert tokens[1:4] == ["returns", "the", "dataset"]
    assert trained.decode(trained("returns the dataset")["input_ids"], True) == (
        "returns the dataset"
    )
    assert trained("\N{SNOWMAN}")["input_ids"][1] == trained.unk_token_id
    batch = trained(["a", "a longer text"], padding=True)
    assert batch["input_ids"][0][-1] == trained.pad_token_id
    assert batch["attention_mask"][0][-1] == 0
    assert len(trained(" word" * 50, truncation=True, max_length=16)["input_ids"]) == 16


def test_wordpiece_covers_the_words_it_was_trained_on(corpus):
    """Every letter is a piece at a word's start and inside, so few words stay unknown."""
    trained = corpora.tokenizer(corpus["text"], vocab_size=1000)
    ids = [i for row in trained(list(corpus["text"]))["input_ids"] for i in row]
    assert ids.count(trained.unk_token_id) < len(ids) / 1000
    words = pre_tokenizers.BertPreTokenizer().pre_tokenize_str(
        normalizers.BertNormalizer().normalize_str(" ".join(corpus["text"]))
    )
    common = {word for word, _ in words if len(word) == 1 and word.isalpha() and word.isascii()}
    assert common <= set(trained.get_vocab())
    assert {f"##{letter}" for letter in common} <= set(trained.get_vocab())


def test_bpe(corpus):
    trained = corpora.tokenizer(corpus["text"], vocab_size=1000, kind="bpe")
    assert len(trained) == 1000
    strange = "naïve \N{SNOWMAN} text\n  with 3 spaces"
    ids = trained(strange)["input_ids"]
    assert ids[-1] == trained.eos_token_id
    assert trained.decode(ids, skip_special_tokens=True) == strange
    assert trained.pad_token_id != trained.eos_token_id


def test_the_same_texts_give_the_same_tokenizer_in_every_process():
    script = """
import hashlib, json
from memlab.book import corpora
for kind in ("wordpiece", "bpe"):
    trained = corpora.tokenizer(corpora.docstrings("datasets")["text"], 800, kind)
    vocabulary = json.dumps(trained.get_vocab(), sort_keys=True)
    print(kind, hashlib.sha256(vocabulary.encode()).hexdigest())
"""
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    for kind in ("wordpiece", "bpe"):
        trained = corpora.tokenizer(corpora.docstrings("datasets")["text"], 800, kind)
        vocabulary = json.dumps(trained.get_vocab(), sort_keys=True)
        assert f"{kind} {hashlib.sha256(vocabulary.encode()).hexdigest()}" in run.stdout


def test_language_model_blocks(corpus):
    trained = corpora.tokenizer(corpus["text"], vocab_size=1000, kind="bpe")
    texts = corpus["text"][:20]
    stream = [i for row in trained(list(texts))["input_ids"] for i in row]
    trained("a truncated call before changes nothing", truncation=True, max_length=3)
    blocks = corpora.language_model_blocks(texts, trained, 64)
    assert len(blocks) == len(stream) // 64
    assert [i for row in blocks["input_ids"] for i in row] == stream[: 64 * len(blocks)]
    assert blocks["labels"][:] == blocks["input_ids"][:]
    with pytest.raises(ValueError) as error:
        corpora.language_model_blocks(texts, trained, len(stream) + 1)
    assert f"from 1 to {len(stream)}" in one_line(error)
    with pytest.raises(ValueError, match="length is 0"):
        corpora.language_model_blocks(texts, trained, 0)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: corpora.docstrings("no_such_package"), "'no_such_package' is not installed"),
        (lambda: corpora.docstrings("../etc"), "'../etc' is not installed"),
        (lambda: corpora.docstrings([]), "packages is empty"),
        (lambda: corpora.docstrings("datasets", "dev"), "allowed are train, validation, test, all"),
        (lambda: corpora.docstrings("datasets", min_words=10**6), "no text of 1000000 words"),
        (lambda: corpora.tokenizer([]), "texts is empty"),
        (lambda: corpora.tokenizer("one text"), "texts is one text"),
        (lambda: corpora.tokenizer(["some words", " \n"]), "text 1 is ' \\n'"),
        (lambda: corpora.tokenizer(["some words", None]), "text 1 is None"),
        (lambda: corpora.tokenizer(["some words"], vocab_size=100), "whole numbers from 512"),
        (lambda: corpora.tokenizer(["some words"], vocab_size=1e3), "vocab_size is 1000.0"),
        (lambda: corpora.tokenizer(["some words"], kind="unigram"), "allowed are wordpiece, bpe"),
    ],
)
def test_bad_input(call, says):
    with pytest.raises(ValueError) as error:
        call()
    assert says in one_line(error)


def test_libraries_leave_no_bar_in_a_notebook():
    """In a process of its own: tests of scripts switch them on again."""
    code = "from memlab.book import corpora; import datasets, transformers; "
    code += "print(datasets.are_progress_bars_disabled(), "
    code += "transformers.logging.is_progress_bar_enabled())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["True", "False"]
