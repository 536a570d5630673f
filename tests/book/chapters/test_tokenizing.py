"""What chapter 9 computes: the peak for the same text, ways timed against Python, drawings."""

import pandas as pd
import pytest
from matplotlib import pyplot as plt

from memlab import Recipe, models
from memlab.book import corpora
from memlab.book.chapters import tokenizing


def gpt2(entries, seq_len=1024):
    config = models.config("gpt2")
    config.vocab_size, config.n_layer = entries, 2
    config.bos_token_id = config.eos_token_id = 0
    shape = dict(batch_size=4, seq_len=seq_len)
    return Recipe(config, precision="fp16-amp", attention="sdpa", **shape)


def test_the_peak_for_the_same_text_is_the_simulated_one():
    lengths = pd.Series({512: 0.5, 2**13: 0.4, 2**15: 0.3})
    same = tokenizing.SameText(gpt2, lengths, weight=14, logit=12)
    simulated, guess = same.checked(2**13)
    assert guess == pytest.approx(simulated, rel=0.03)
    peaks = same.peaks()
    assert list(peaks.index) == [512, 2**13, 2**15] and peaks[2**13] == pytest.approx(guess, 0.01)
    tokenizing.draw_tradeoff(lengths, peaks, {2**13: simulated})
    left, right = plt.gcf().axes
    assert [len(ax.lines) for ax in (left, right)] == [1, 2]
    plt.close("all")


@pytest.fixture(scope="module")
def rust():
    return corpora.tokenizer(corpora.pages()["text"][:12], vocab_size=600)


def test_every_way_is_timed_and_python_is_the_measure(rust):
    frame = tokenizing.times_as_fast(rust, tokenizing.in_python(rust.get_vocab()), rounds=2)
    assert frame.index[1] == "Python again" and (frame.loc["Python"] == 1).all()
    assert list(frame.columns) == [64, 512, 8192] and (frame > 0).all(axis=None)


def test_the_steps_are_drawn_in_rows(rust):
    tokenizing.draw_pipeline(rust.backend_tokenizer, "A name")
    (ax,) = plt.gcf().axes
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == ["text", "normalized", "words", "pieces", "template", "ids"]
    texts = [text.get_text() for text in ax.texts]
    assert texts[:6] == list("A name") and "[CLS]" in texts and "name" in texts
    plt.close("all")


def test_a_unigram_cuts_what_it_has_learned():
    learned = tokenizing.unigram(corpora.pages()["text"][:10], entries=300)
    pieces = learned.encode("the name").tokens
    assert "".join(pieces).replace("\N{LOWER ONE EIGHTH BLOCK}", " ").strip() == "the name"
