"""Traces on disk, in the user's cache: one file per half of a trace.

A half is either the forward and backward passes, or the update. The name of its file is a hash of
the half's key, the installed library releases and the format. So a trace of other releases is never
found. A file that cannot be read counts as missing, and its half is recorded again.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import gzip
import hashlib
import json
import lzma
import os
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from memlab.card.links import CARDS
from memlab.footprint import Category, Phase
from memlab.libraries import installed, write_whole
from memlab.predict.layer_patterns import Layers
from memlab.trace.events import Alloc, Free, Marker, TraceEvent
from memlab.trace.layered import Counts, LayeredLog
from memlab.trace.reductions import Reduction
from memlab.trace.trace import PhaseTrace
from memlab.trace.work import Work

# Raise this number by hand when a rule of memlab changes which events a run has, or what a file
# holds. All traces are then recorded again. A new release of a library needs no new format.
FORMAT = 4
LARGEST = 256 * 2**20  # bytes of all files together; the least recently used ones are deleted
# Exceptions from a file that was cut short, is corrupt, or was written by another program.
UNREADABLE = (OSError, EOFError, ValueError, LookupError, TypeError, zlib.error, lzma.LZMAError)


@dataclass(frozen=True)
class RecordedPhase:
    """A half of a trace, as it was recorded.

    half: the events.
    layers: how the model's layers repeat; None for a model that was run at its own depth.
    largest: the moments that are the largest at some sizes (`memlab.panels.moments`), for halves
        that the page's calculator uses; else None.
    """

    half: PhaseTrace
    layers: Layers | None
    largest: list[int] | None = None


class Store:
    """A folder of halves. Several processes may use it at once, as files are written atomically."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)

    def read_into(self, phases: dict, key: str) -> None:
        """Add the stored half of a key to `phases`, or None if it is known to have no trace.

        Adds nothing if nothing is stored or the file cannot be read.
        """
        with contextlib.suppress(*UNREADABLE):
            phases[key] = kept_of(gzip.decompress(self._file(key).read_bytes()))
            os.utime(self._file(key))  # used now: `_forget_the_oldest` goes by this time

    def write(self, key: str, phase: RecordedPhase | None) -> None:
        """Store a half, or None for a key without a trace; nothing if the folder is read-only."""
        text = text_of(phase)
        with contextlib.suppress(OSError):
            write_whole(self._file(key), gzip.compress(text.encode(), compresslevel=3))
            self._forget_the_oldest()

    def _file(self, key: str) -> Path:
        text = f"{key} {_surroundings()}"
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.json.gz"

    def _forget_the_oldest(self) -> None:
        files = [(file.stat(), file) for file in self.folder.iterdir()]
        files.sort(key=lambda entry: entry[0].st_mtime)
        total = sum(stat.st_size for stat, _ in files)
        while total > LARGEST:
            stat, file = files.pop(0)
            file.unlink(missing_ok=True)
            total -= stat.st_size


@functools.cache
def _surroundings() -> str:
    """The installed library releases and the format, as text."""
    releases = [f"{name} {release}" for name, release in installed().items()]
    return f"{', '.join(releases)}, format {FORMAT}"


def other_releases(versions: dict[str, str], names: Iterable[str]) -> str:
    """The libraries that are installed in other releases than recorded, as text; empty if none.

    versions: library -> its release at the recording. names: the libraries to compare.
    """
    here = installed()
    releases = {name: versions[name].partition("+")[0] for name in names if name in versions}
    return ", ".join(
        f"{name} {release} (here {here.get(name, 'none')})"
        for name, release in releases.items()
        if release != here.get(name)
    )


# ---------------------------------------------------------------------- as JSON


def text_of(phase: RecordedPhase | None) -> str:
    """A half, or None for a key without a trace, as one line of JSON."""
    return json.dumps(phase and _values(phase), separators=(",", ":"))


def kept_of(text: str | bytes) -> RecordedPhase | None:
    """The inverse of `text_of`. Raises ValueError, LookupError or TypeError for other text."""
    values = json.loads(text)
    return values and _kept(values)


def _values(phase: RecordedPhase) -> dict:
    half, blocks = phase.half, phase.half.log.blocks
    # A `Free` names its allocation by the place of that among the kinds, which must come before it.
    places: dict[Alloc, int] = {}
    kinds: list[list] = []
    for kind in half.log.kinds:
        kinds.append(_step_values(kind, places))
        if type(kind) is Alloc:
            places[kind] = len(kinds) - 1
    return {
        "sizes": half.symbols and half.symbols.sizes,
        "batches": half.batches,
        "workspace": half.workspace,
        "layers": phase.layers and asdict(phase.layers),
        "largest": phase.largest,
        "kinds": kinds,
        "order": _packed(half.log.order),
        "blocks": blocks and [[place, _packed(block)] for place, block in blocks],
        "patterns": half.log.patterns,
        "weights": sorted([*kind, *counts] for kind, counts in half.log.weights.items()),
        "work": sorted([*_fields(work), *counts] for work, counts in half.log.work.items()),
        "assumptions": half.log.assumptions,
    }


def _fields(work: Work) -> tuple:
    """The fields of an operator's work, without trailing ones that have their default."""
    if work.waited:
        return work
    # The last three are `carried`, `cards` and `waited`. Most operators have the defaults.
    if work.cards != CARDS:
        return work[:-1]
    return work[:-2] if work.carried else work[:-3]


def _step_values(step: TraceEvent, places: dict[Alloc, int]) -> list:
    if isinstance(step, Free):
        return ["Free", places[step.alloc], step.phase, step.which]
    if isinstance(step, Marker):
        return ["Marker", step.value]
    return ["Alloc", *(step if step.reduction else step[:-1])]  # `reduction` is the last field


def _kept(values: dict) -> RecordedPhase:
    kinds: list[TraceEvent] = []
    for name, *rest in values["kinds"]:
        kinds.append(_step(name, rest, kinds))
    work: Counts = {}
    for *fields, once, each in values["work"]:  # a count, and its growth per layer pattern
        flops, dtype, result, moved, lists, elements, phase, *last = fields
        # JSON has lists and plain text where `Work` has tuples and a `Phase`.
        counts = flops, dtype, tuple(result), tuple(moved), lists, elements, Phase(phase)
        work[Work(*counts, *last)] = once, each
    blocks = values["blocks"]
    log = LayeredLog(
        tuple(kinds),
        _unpacked(values["order"]),
        blocks and tuple((place, _unpacked(block)) for place, block in blocks),
        values["patterns"],
        {(elements, free): tuple(counts) for elements, free, *counts in values["weights"]},
        work,
        tuple(values["assumptions"]),
    )
    layers = values["layers"] and Layers(**values["layers"])
    half = PhaseTrace(log, values["sizes"], values["batches"], values["workspace"])
    return RecordedPhase(half, layers, values["largest"])


def _step(name: str, rest: list, kinds: list[TraceEvent]) -> TraceEvent:
    if name == "Alloc":
        nbytes, category, phase, module, operation, stream, item, *sum_of = rest
        reduction = Reduction(*sum_of[0]) if sum_of else None
        alloc = nbytes, Category(category), Phase(phase), module, operation, stream, item
        return Alloc(*alloc, reduction)
    if name == "Free":
        alloc, phase, which = rest
        return Free(kinds[alloc], Phase(phase), which)
    return Marker(rest[0])


def _packed(numbers: np.ndarray) -> str:
    # Little-endian 32-bit integers on every machine.
    return base64.b64encode(numbers.astype("<i4").tobytes()).decode()


def _unpacked(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<i4").astype(np.int32)
