"""Traces that come with memlab, for the models of its catalogue.

memlab/data/traces has one file per structure: JSON lines, compressed by xz. Lines alternate between
a key and the half of a trace (a `RecordedPhase`). The structure, with which every key begins, is
left out of the keys. `index.json` holds the format and the library releases of the recording.
tools/record_traces.py writes these files. Traces of another format are not used. With other
releases a trace is compared with a run before it is used (`memlab.predict.traces`).
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
NO_TRACE = text_of(None)  # the line of a key that is known to have no trace


class Shipped:
    """The halves of traces in a folder. A structure's file is read when it is first needed."""

    def __init__(self, folder: Path = FOLDER):
        self._folder = folder
        self._lines: dict[str, dict[str, str]] = {}  # by structure, as `lines` returns them
        index = folder / "index.json"
        self.index = json.loads(index.read_text()) if index.exists() else {}
        self.versions = self.index.get("versions", {})

    @classmethod
    @functools.cache
    def of_memlab(cls) -> Shipped:
        """The traces in this package."""
        return cls()

    @functools.cached_property
    def is_of_this_format(self) -> bool:
        """Whether this memlab can read the traces, and would record the same ones."""
        return self.index.get("format") == FORMAT

    def others_of(self, recipe: Recipe) -> str:
        """The libraries of a recipe that are installed in other releases than the recorded ones.

        As text, with both releases of each; empty if there are none.
        """
        names = ["torch", "transformers"]
        names += ["peft"] * (recipe.lora_rank > 0)
        eight_bits = is_of_bitsandbytes(recipe.optimizer)
        names += ["bitsandbytes"] * (recipe.base in QUANTIZED or eight_bits)
        return other_releases(self.versions, names)

    def __contains__(self, key: str) -> bool:
        structure, rest = split_key(key)
        return rest in self.lines(structure)

    def has_half(self, key: str) -> bool:
        """Whether a half is stored for a key, not only the note that it has no trace."""
        structure, rest = split_key(key)
        return self.lines(structure).get(rest, NO_TRACE) != NO_TRACE

    def read_into(self, phases: dict, key: str) -> None:
        """Add the stored half of a key to `phases`, or None if it is known to have no trace.

        Adds nothing if nothing is stored or the file cannot be read.
        """
        structure, rest = split_key(key)
        with contextlib.suppress(*UNREADABLE):
            phases[key] = kept_of(self.lines(structure)[rest])

    def lines(self, structure: str) -> dict[str, str]:
        """Key without the structure -> the line of its half, of all keys of a structure."""
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
    """(the structure that a key begins with, the rest of the key)."""
    # A key is two JSON values with a space between them (`traces.keys_of`).
    _, end = json.JSONDecoder().raw_decode(key)
    return key[:end], key[end + 1 :]


def file_of(structure: str) -> str:
    """The name of the file of a structure's traces."""
    model_type = json.loads(structure)["model_type"]
    return f"{model_type}-{sha256(structure.encode()).hexdigest()[:8]}.xz"
