"""Recorded and published runs in one schema.

`recorded` runs were measured by memlab on a named device; `published` ones stand in a document. A
file holds `{"schema": 1, "records": [...]}`, one object of `Record`'s fields each; the files of the
package lie in memlab/data/records. Files are written whole or not at all.
"""

import dataclasses
import datetime
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SCHEMA = 1
KINDS = ("recorded", "published")
FOLDER = Path(__file__).parent.parent / "data" / "records"
# Fields that recipes had when runs were recorded, with the values that every one of them has.
GONE = {"block_size": 64, "stochastic_rounding": False}
SPARED = ("loop", "settings")  # not written where they are empty
UNITS = ("_bytes", "_seconds", "_per_second")


@dataclasses.dataclass(frozen=True)
class Record:
    """One run: what was trained, on what, and what it took.

    kind: `recorded` (by memlab, on the device named) or `published` (in `source`).
    name: short and unique within its file.
    recipe: field of `memlab.Recipe` -> plain value; `model` may be an object, the values of a
        config.json.
    figures: name -> number, the unit at the end of the name (`device_used_bytes`,
        `step_seconds`, `samples_per_second`), or `out_of_memory` -> bool.
    device: the card as its driver names it. driver: its version, None where not known.
    versions: library -> version, as far as known. date: of the run, ISO (2022-01-11).
    source: a citation, or the commit of memlab that measured.
    loop: the training loop that ran, a name of `LOOPS` in the repository's validation/loops;
        empty for memlab's own. Other loops' runs may differ from their recipe in what it has no
        field for.
    settings: what such a loop is told beside the recipe, name -> plain JSON value; `family` and
        `technique` are for tables, where they do not follow from the recipe.

    Raises ValueError, in one line, for a field that does not hold what it should.
    """

    kind: str
    name: str
    recipe: dict[str, Any]
    figures: dict[str, Any]
    device: str
    driver: str | None
    versions: dict[str, str]
    date: str
    source: str
    loop: str = ""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}: allowed are {', '.join(KINDS)}")
        for field in ("name", "device", "source"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{field} is {value!r}: allowed is a text that is not empty")
        if not isinstance(self.loop, str):
            raise ValueError(f"loop is {self.loop!r}: allowed is a text, empty for memlab's own")
        if self.driver is not None and not isinstance(self.driver, str):
            raise ValueError(f"driver is {self.driver!r}: allowed are a text or null")
        for field in ("recipe", "figures", "versions", "settings"):
            value = getattr(self, field)
            if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
                raise ValueError(f"{field} is {value!r}: allowed is an object with named values")
        known = {n: v for n, v in self.recipe.items() if n not in GONE or v != GONE[n]}
        object.__setattr__(self, "recipe", known)
        for name, value in self.recipe.items():
            plain = (str, int, float, bool, list) + (dict,) * (name == "model")
            if value is not None and not isinstance(value, plain):
                raise ValueError(f"recipe {name} is {value!r}: allowed are plain JSON values")
        if not self.figures:
            raise ValueError("figures is {}: allowed is at least one figure")
        for name, value in self.figures.items():
            _check_figure(name, value)
        try:
            datetime.date.fromisoformat(self.date)
        except (TypeError, ValueError):
            raise ValueError(f"date is {self.date!r}: allowed is one like 2022-01-11") from None


def _check_figure(name: str, value: Any) -> None:
    if name == "out_of_memory":
        if not isinstance(value, bool):
            raise ValueError(f"figure out_of_memory is {value!r}: allowed are true and false")
        return
    if not name.endswith(UNITS):
        raise ValueError(f"figure {name!r} has no unit: allowed are names on {', '.join(UNITS)}")
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:
        raise ValueError(f"figure {name} is {value!r}: allowed are numbers from 0")
    if name.endswith("_bytes") and value != int(value):
        raise ValueError(f"figure {name} is {value!r}: allowed are whole bytes")


def find_records(
    kind: str | None = None,
    device: str | None = None,
    folder: Path | str = FOLDER,
    loop: str | None = None,
    **recipe: Any,
) -> list[Record]:
    """The records of a folder's files, in the order of the files and within them.

    kind: one of `KINDS`; device: a part of the device's name, upper or lower case alike; loop: the
    name of a training loop, empty for memlab's own; further keywords are fields of the recipe:
    `find_records(device="v100", precision="fp16-amp")`.
    """
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind is {kind!r}: allowed are {', '.join(KINDS)}")
    found = [record for path in sorted(Path(folder).glob("*.json")) for record in load(path)]
    return [
        record
        for record in found
        if kind in (None, record.kind)
        and (device or "").lower() in record.device.lower()
        and loop in (None, record.loop)
        and all(field in record.recipe for field in recipe)
        and all(record.recipe[field] == value for field, value in recipe.items())
    ]


def load(path: Path | str) -> list[Record]:
    """The records of one file. Raises ValueError, in one line, with the file and what is wrong."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable JSON file ({error})") from None
    if not isinstance(content, dict) or not isinstance(content.get("records"), list):
        raise ValueError(f"{path}: allowed is an object with a list named records")
    if content.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema is {content.get('schema')!r}: allowed is {SCHEMA}")
    found = [_record(values, f"{path}: record {i}") for i, values in enumerate(content["records"])]
    _check_names(found, path)
    return found


def _record(values: Any, place: str) -> Record:
    if not isinstance(values, dict):
        raise ValueError(f"{place} is {values!r}: allowed is an object")
    fields = [field.name for field in dataclasses.fields(Record)]
    for name in fields:
        if name not in values and name not in SPARED:
            raise ValueError(f"{place} has no {name}: needed are {', '.join(fields)}")
    for name in values:
        if name not in fields:
            raise ValueError(f"{place} has an unknown {name!r}: allowed are {', '.join(fields)}")
    try:
        return Record(**values)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _values(record: Record) -> dict[str, Any]:
    """The fields of a record as its file holds them, without those of memlab's own loop."""
    values = dataclasses.asdict(record)
    return {name: value for name, value in values.items() if value or name not in SPARED}


def _check_names(found: list[Record], path: Path | str) -> None:
    names = [record.name for record in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{path}: two records are named {twice[0]!r}: allowed are unique names")


def save(path: Path | str, records: Iterable[Record]) -> None:
    """Write records to a file, which is afterwards either the old one or the whole new one.

    Everything is written to a temporary file beside it first, and that takes its place at once.
    Raises ValueError for what is no record or for two of the same name, before anything is written.
    """
    path, kept = Path(path), list(records)
    for record in kept:
        if not isinstance(record, Record):
            raise ValueError(f"{record!r} is no record: allowed are memlab.evidence.records.Record")
    _check_names(kept, path)
    rows = ",\n".join(json.dumps(_values(record)) for record in kept)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(f'{{"schema": {SCHEMA}, "records": [\n{rows}\n]}}\n')
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
