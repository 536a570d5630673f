"""Halves of traces that come with memlab: those of the catalogue's structures.

A file per structure (memlab/data/traces), xz of lines of JSON: in turn the rest of a key, as the
structure begins all of them, and its half. `index.json` has the format and the releases they were
recorded with. tools/record_traces.py makes them. Those of another format are not used; with other
releases each is compared with a run before it is used (`memlab.predict.traces`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import lzma
from hashlib import sha256
from pathlib import Path

from memlab.predict.store import FORMAT, UNREADABLE, kept_of, other_releases, text_of
from memlab.spec.optimizers import is_of_bitsandbytes
from memlab.spec.recipe import QUANTIZED, Recipe

FOLDER = Path(__file__).parent.parent / "data" / "traces"
NO_TRACE = text_of(None)


class Shipped:
    """The halves of a folder, read when they are asked for."""

    def __init__(self, folder: Path = FOLDER):
        self._folder = folder
        self._lines: dict[str, dict[str, str]] = {}
        index = folder / "index.json"
        self.index = json.loads(index.read_text()) if index.exists() else {}
        self.versions = self.index.get("versions", {})

    @classmethod
    @functools.cache
    def of_memlab(cls) -> Shipped:
        """Those of this package."""
        return cls()

    @functools.cached_property
    def is_of_this_format(self) -> bool:
        """Whether today's memlab can read them, and would record the same."""
        return self.index.get("format") == FORMAT

    def others_of(self, recipe: Recipe) -> str:
        """Which libraries that a recipe uses are here in another release; empty for none."""
        names = ["torch", "transformers"]
        names += ["peft"] * (recipe.lora_rank > 0)
        eight_bits = is_of_bitsandbytes(recipe.optimizer)
        names += ["bitsandbytes"] * (recipe.base in QUANTIZED or eight_bits)
        return other_releases(self.versions, names)

    def __contains__(self, key: str) -> bool:
        structure, rest = split_key(key)
        return rest in self.lines(structure)

    def has_half(self, key: str) -> bool:
        """Whether there is a half of a key, and not only the word that it has no trace."""
        structure, rest = split_key(key)
        return self.lines(structure).get(rest, NO_TRACE) != NO_TRACE

    def read_into(self, phases: dict, key: str) -> None:
        """Add what is there of a key: a half, or None for what has no trace."""
        structure, rest = split_key(key)
        with contextlib.suppress(*UNREADABLE):
            phases[key] = kept_of(self.lines(structure)[rest])

    def lines(self, structure: str) -> dict[str, str]:
        """The rest of each key -> the line of its half."""
        if structure not in self._lines:
            file = self._folder / file_of(structure)
            lines_by_key = {}
            with contextlib.suppress(*UNREADABLE):
                if self.is_of_this_format:
                    lines = lzma.decompress(file.read_bytes()).decode().splitlines()
                    lines_by_key = dict(zip(lines[::2], lines[1::2], strict=True))
            self._lines[structure] = lines_by_key
        return self._lines[structure]


def split_key(key: str) -> tuple[str, str]:
    """(the structure that a key begins with, the rest)."""
    _, end = json.JSONDecoder().raw_decode(key)
    return key[:end], key[end + 1 :]


def file_of(structure: str) -> str:
    """The name of a structure's file."""
    model_type = json.loads(structure)["model_type"]
    return f"{model_type}-{sha256(structure.encode()).hexdigest()[:8]}.xz"
