"""Real text without a network: two corpora, tokenizers trained on the spot, blocks of tokens.

`pages` is the text of this book's first edition, a file that comes with memlab. What a small model
learns from it does not depend on the release of Python or of any library. `docstrings` are those of
the installed packages: thousands of short texts, labelled by package, which change with the
packages' releases. They are read from source files, so nothing is imported. That takes one to two
seconds.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import itertools
import lzma
import os
import re
from collections import Counter
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from memlab.fields import integer_from, one_of

# datasets and tokenizers are imported where they are used: most chapters need no text.
if TYPE_CHECKING:
    import datasets
    from tokenizers import normalizers
    from transformers import PreTrainedTokenizerFast

PACKAGES = ("torch", "transformers", "datasets", "numpy", "pandas", "matplotlib")
SPLITS = ("train", "validation", "test", "all")
SMALLEST_VOCABULARY = 512
# A docstring in three double quotes right after the colon of a `def` or `class`. Parsing the files
# with `ast` would find 5 to 10 % more and take twenty times as long.
_DOCSTRING = re.compile(r':[ \t]*\n[ \t]*[rR]?"""(.*?)"""', re.DOTALL)
_SKIPPED_FOLDERS = {"test", "tests", "testing", "_vendor", "__pycache__"}


def docstrings(
    packages: Iterable[str] = PACKAGES, split: str = "train", min_words: int = 8
) -> datasets.Dataset:
    """Docstrings of installed packages. Columns: text (str), label (ClassLabel, the package).

    packages: names of packages. A text that occurs in several counts for the first of them.
    split: one of `SPLITS`: 80, 10 and 10 % of the texts, or all. The hash of a text decides, so a
        text never moves between splits.
    min_words: shorter texts are left out.

    Raises ValueError for a package that is not installed, and if no text is left.
    """
    packages = [packages] if isinstance(packages, str) else list(packages)
    if not packages:
        raise ValueError("packages is empty: allowed are names of installed packages")
    package_of: dict[str, str] = {}
    for package in packages:
        for path in _python_files(package):
            for text in _DOCSTRING.findall(path.read_text(encoding="utf-8", errors="replace")):
                package_of.setdefault(inspect.cleandoc(text), package)
    return _dataset(package_of, packages, split, min_words)


def pages() -> datasets.Dataset:
    """The 40 pages of this book's first edition. Columns: text (str), label (the page's name).

    Each is prose in Markdown with 100 to 4,900 words, without code cells. The file never changes.
    """
    packed = resources.files("memlab.data").joinpath("pages.txt.xz").read_bytes()
    by_page = dict(page.split("\n", 1) for page in lzma.decompress(packed).decode().split("\f"))
    texts = {text.strip(): name for name, text in by_page.items()}
    return _dataset(texts, list(by_page), "all", min_words=1)


def _python_files(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"package {package!r} is not installed: allowed are installed packages")
    paths = []
    for folder, folders, files in os.walk(spec.submodule_search_locations[0]):
        # In place, so that `os.walk` skips these folders; sorted, so that the order is the same
        # on every machine.
        folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
        paths += [Path(folder, name) for name in sorted(files) if name.endswith(".py")]
    return paths


def _dataset(
    label_of: dict[str, str], names: list[str], split: str, min_words: int
) -> datasets.Dataset:
    one_of("split", split, SPLITS)
    texts = [t for t in label_of if len(t.split()) >= min_words and split in ("all", split_of(t))]
    if not texts:
        raise ValueError(
            f"no text of {min_words} words or more in split {split!r}: allow shorter ones"
        )
    import datasets

    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
    )
    columns = {"text": texts, "label": [label_of[text] for text in texts]}
    return datasets.Dataset.from_dict(columns, features=features)


def split_of(text: str) -> str:
    """The split of a text, decided by its SHA-256 hash alone."""
    place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 100
    return "train" if place < 80 else "validation" if place < 90 else "test"


def tokenizer(
    texts: Iterable[str], vocab_size: int = 4000, kind: str = "wordpiece"
) -> PreTrainedTokenizerFast:
    """A tokenizer trained on texts: BERT's pipeline (`wordpiece`) or GPT-2's (`bpe`).

    kind: `wordpiece` lower-cases, splits words from punctuation and encodes `[CLS] text [SEP]`.
        `bpe` works on bytes, so that no text is unknown, and encodes `text<|endoftext|>`.
    vocab_size: the most entries; there are fewer if the texts have no more pieces.

    Both kinds have a padding token. The same texts always give the same tokenizer.

    Raises ValueError for an empty list, a blank text, and a vocabulary below 512 entries.
    """
    integer_from(SMALLEST_VOCABULARY)("vocab_size", vocab_size)
    one_of("kind", kind, ("wordpiece", "bpe"))
    train = _train_wordpiece if kind == "wordpiece" else _train_bpe
    return train(_checked(texts), vocab_size)


def _train_wordpiece(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    import tokenizers
    from tokenizers import decoders, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    normalizer = normalizers.BertNormalizer(lowercase=True)
    pieces = special + _wordpieces(texts, vocab_size - len(special), normalizer)
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    trained = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    trained.normalizer = normalizer
    trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trained.decoder = decoders.WordPiece()
    trained.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    tokens = dict(zip(names, special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=trained, **tokens)


def _wordpieces(texts: list[str], count: int, normalizer: normalizers.Normalizer) -> list[str]:
    """The first `count` pieces of a WordPiece vocabulary, single characters first.

    The WordPiece trainer of tokenizers breaks ties in a random order. Its BPE trainer does not, if
    it gets the alphabet. So this trains BPE on words with a mark in front. A piece with the mark
    begins a word; a piece without it continues one, which WordPiece writes as `##piece`.
    """
    import tokenizers
    from tokenizers import pre_tokenizers, trainers

    mark = "\u2581"
    counts = Counter(itertools.chain.from_iterable(map(normalizer.normalize_str, texts)))
    # Sorted by frequency, then by code point, so that ties are broken the same way every time.
    letters = [x for x in sorted(counts, key=lambda x: (-counts[x], x)) if x not in (" ", mark)]
    alphabet = sorted(letters[:200])
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.normalizer = normalizer
    marks = pre_tokenizers.Metaspace(mark, prepend_scheme="always", split=False)
    trained.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), marks])
    trainer = trainers.BpeTrainer(
        vocab_size=count + len(alphabet),
        initial_alphabet=[*alphabet, mark],
        limit_alphabet=len(alphabet) + 1,
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    vocabulary = trained.get_vocab()
    merged = sorted(vocabulary, key=vocabulary.__getitem__)
    pieces = alphabet + [f"##{letter}" for letter in alphabet]
    pieces += [p.removeprefix(mark) if p.startswith(mark) else f"##{p}" for p in merged]
    return [piece for piece in dict.fromkeys(pieces) if piece][:count]


def _train_bpe(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    import tokenizers
    from tokenizers import decoders, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    end, pad = "<|endoftext|>", "<|padding|>"
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end, pad],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    template = processors.TemplateProcessing(
        single=f"$A {end}",
        pair=f"$A {end} $B:1 {end}:1",
        special_tokens=[(end, trained.token_to_id(end))],
    )
    trained.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), template]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=trained, bos_token=end, eos_token=end, pad_token=pad
    )


def language_model_blocks(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerFast, length: int
) -> datasets.Dataset:
    """All texts as one stream of tokens, cut into blocks of `length` ids.

    Columns: input_ids and labels. The labels equal the ids, because transformers shifts them. A
    rest shorter than a block is dropped.

    Raises ValueError for blank texts, and if the texts do not fill one block.
    """
    import datasets

    encoded = tokenizer(_checked(texts), truncation=False, padding=False)["input_ids"]
    stream = np.fromiter(itertools.chain.from_iterable(encoded), dtype=np.int64)
    integer_from(1, len(stream))("length", length)
    blocks = list(stream[: len(stream) // length * length].reshape(-1, length))
    return datasets.Dataset.from_dict({"input_ids": blocks, "labels": blocks})


def _checked(texts: Iterable[str]) -> list[str]:
    if isinstance(texts, str):
        raise ValueError("texts is one text: allowed is a list of texts")
    texts = list(texts)
    if not texts:
        raise ValueError("texts is empty: allowed is a list of one text or more")
    for i, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"text {i} is {text!r}: allowed are texts with at least one word")
    return texts
