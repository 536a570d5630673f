"""Offline text: deterministic corpora, stable splits, tokenizers trained on the spot."""

import hashlib
import json

import pytest
from helpers import refused, run_python

from memlab.book import corpora


@pytest.fixture(scope="module")
def corpus():
    return corpora.docstrings("datasets", split="all")


def test_the_pages_never_change():
    """What small models have learnt from them, and the figures in the text, hang on it."""
    data = corpora.pages()
    assert len(data) == 40 and max(len(words.split()) for words in data["text"]) > 1000
    assert hashlib.sha256(json.dumps(data[:]).encode()).hexdigest()[:16] == "f95537464249aeca"


def test_docstrings_are_unique_labelled_and_long_enough(corpus):
    assert len(set(corpus["text"])) == len(corpus) > 100
    assert min(len(words.split()) for words in corpus["text"]) >= 8
    assert set(corpus["label"]) == {0} and corpus.features["label"].names == ["datasets"]


def test_nothing_is_imported_and_nothing_is_cached_on_disk(corpus, tmp_path, monkeypatch):
    assert corpus.cache_files == []
    package = tmp_path / "raises_on_import"
    package.mkdir()
    words = "one two three four five six seven eight"
    (package / "__init__.py").write_text(f'raise RuntimeError\n\n\ndef f(x):\n    """{words}"""\n')
    monkeypatch.syspath_prepend(tmp_path)
    assert corpora.docstrings("raises_on_import", "all")[:] == {"text": [words], "label": [0]}


def test_bpe(corpus):
    trained = corpora.tokenizer(corpus["text"], vocab_size=1000, kind="bpe")
    assert len(trained) == 1000
    strange = "naïve \N{SNOWMAN} text\n  with 3 spaces"
    ids = trained(strange)["input_ids"]
    assert ids[-1] == trained.eos_token_id
    assert trained.decode(ids, skip_special_tokens=True) == strange
    assert trained.pad_token_id != trained.eos_token_id


def test_a_text_stays_in_its_split(corpus):
    parts = {name: corpora.docstrings("datasets", name)["text"] for name in corpora.SPLITS[:3]}
    assert sorted(sum(map(list, parts.values()), [])) == sorted(corpus["text"])
    assert 0.75 < len(parts["train"]) / len(corpus) < 0.85
    wider = corpora.docstrings(["datasets", "numpy"], "validation", min_words=40)["text"]
    assert {text for text in parts["validation"] if len(text.split()) >= 40} <= set(wider)


def test_wordpiece_knows_every_letter(corpus):
    trained = corpora.tokenizer(corpus["text"], vocab_size=1000)
    tokens = trained.convert_ids_to_tokens(trained("Returns the DATASET.", "Second")["input_ids"])
    assert len(trained) == 1000 and tokens[:4] == ["[CLS]", "returns", "the", "dataset"]
    ids = [i for row in trained(list(corpus["text"]))["input_ids"] for i in row]
    assert ids.count(trained.unk_token_id) < len(ids) / 1000


def test_the_same_texts_give_the_same_tokenizer_in_every_process():
    script = """
import hashlib, json
from memlab.book import corpora
for kind in ("wordpiece", "bpe"):
    trained = corpora.tokenizer(corpora.docstrings("datasets")["text"], 800, kind)
    print(hashlib.sha256(json.dumps(trained.get_vocab(), sort_keys=True).encode()).hexdigest())
"""
    runs = [run_python(script).stdout for _ in range(2)]
    assert runs[0] == runs[1] and len(set(runs[0].split())) == 2


def test_language_model_blocks(corpus):
    trained = corpora.tokenizer(corpus["text"], vocab_size=1000, kind="bpe")
    texts = corpus["text"][:20]
    stream = [i for row in trained(list(texts))["input_ids"] for i in row]
    trained("a truncated call before changes nothing", truncation=True, max_length=3)
    blocks = corpora.language_model_blocks(texts, trained, 64)
    assert [i for row in blocks["input_ids"] for i in row] == stream[: len(stream) // 64 * 64]
    assert blocks["labels"][:] == blocks["input_ids"][:]
    for length, says in ((0, "length is 0"), (len(stream) + 1, f"from 1 to {len(stream):,}")):
        with pytest.raises(ValueError, match=says):
            corpora.language_model_blocks(texts, trained, length)


@pytest.mark.parametrize(
    ("make", "given", "says"),
    [
        (corpora.docstrings, {"packages": "../etc"}, "'../etc' is not installed"),
        (corpora.docstrings, {"split": "dev"}, "allowed are train, validation, test, all"),
        (corpora.docstrings, {"min_words": 10**6}, "no text of 1000000 words"),
        (corpora.docstrings, {"packages": []}, "packages is empty"),
        (corpora.tokenizer, {"texts": []}, "texts is empty"),
        (corpora.tokenizer, {"texts": "one text"}, "texts is one text"),
        (corpora.tokenizer, {"texts": ["some words", " \n"]}, r"text 1 is ' \\n'"),
        (corpora.tokenizer, {"texts": ["some words", None]}, "text 1 is None"),
        (corpora.tokenizer, {"texts": ["words"], "vocab_size": 100}, "whole numbers from 512"),
        (corpora.tokenizer, {"texts": ["words"], "vocab_size": 1e3}, "vocab_size is 1000.0"),
        (corpora.tokenizer, {"texts": ["words"], "kind": "unigram"}, "allowed are wordpiece, bpe"),
    ],
)
def test_bad_input(make, given, says):
    with refused(says):
        make(**({"packages": "datasets"} if make is corpora.docstrings else {}) | given)
