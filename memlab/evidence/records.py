"""Recorded and published runs in one schema.

`recorded` runs were measured by memlab on a named device; `published` runs come from a document. A
file holds `{"schema": 1, "records": [...]}`, where each record is an object with the fields of
`Record`. The package's own files are in memlab/data/records. Files are written whole or not at all.
"""

import dataclasses
import datetime
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from memlab.libraries import write_whole

SCHEMA = 1
KINDS = ("recorded", "published")
FOLDER = Path(__file__).parent.parent / "data" / "records"
UNITS = ("_bytes", "_seconds", "_per_second")
TEXTS, OBJECTS = ("name", "device", "source"), ("recipe", "figures", "versions", "settings")
MAY_BE_EMPTY = ("versions", "settings")


@dataclasses.dataclass(frozen=True)
class Record:
    """One run: what was trained, on which device, and what it took.

    kind: `recorded` (by memlab, on the named device) or `published` (in `source`).
    name: short, and unique within its file.
    recipe: field of `memlab.Recipe` -> plain value; `model` may be an object with the values of a
        config.json.
    figures: name -> number, with the unit at the end of the name (`device_used_bytes`,
        `step_seconds`, `samples_per_second`), or `out_of_memory` -> bool.
    device: the GPU as its driver names it, or the CPU with its number of threads.
    driver: version of the driver, None if it is not known.
    versions: library -> version, as far as it is known.
    date: of the run, in ISO form (2022-01-11).
    source: a citation, or the commit of memlab that measured the run.
    loop: the training loop, a name of `LOOPS` in the repository's validation/loops; empty for
        memlab's own. Runs of other loops may differ from their recipe where it has no field.
    settings: what such a loop needs besides the recipe, name -> plain JSON value. `family` and
        `technique` are for tables, where they do not follow from the recipe.

    Raises ValueError in one line for a field with an invalid value.
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
        for kind, names in ((str, TEXTS), (dict, OBJECTS)):
            for name in names:
                value = getattr(self, name)
                if not isinstance(value, kind) or not (value or name in MAY_BE_EMPTY):
                    what = "a text" if kind is str else "an object"
                    raise ValueError(f"{name} is {value!r}: allowed is {what} that is not empty")
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
        raise ValueError(
            f"figure {name!r} has no unit: allowed are names that end in {', '.join(UNITS)}"
        )
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
    """The records in a folder's files, in the order of the files and within them.

    kind: `recorded` or `published`; None takes both.
    device: a part of the device's name, in upper or lower case.
    folder: where the files are; the package's own by default.
    loop: the name of a training loop, empty for memlab's own; None takes all.
    recipe: values that fields of the recipe must have, as further keywords:
        `find_records(device="v100", precision="fp16-amp")`.

    Raises ValueError in one line for another kind, and for a file that is not whole.
    """
    if kind not in (None, *KINDS):
        raise ValueError(f"kind is {kind!r}: allowed are {', '.join(KINDS)}")
    asked = recipe.items()  # views of items compare as sets: `asked` must be a subset
    return [
        record
        for path in sorted(Path(folder).glob("*.json"))
        for record in load(path)
        if kind in (None, record.kind)
        and (device or "").lower() in record.device.lower()
        and loop in (None, record.loop)
        and asked <= record.recipe.items()
    ]


def load(path: Path | str) -> list[Record]:
    """The records of one file.

    Raises ValueError in one line, which names the file and what is wrong with it.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable JSON file ({error})") from None
    if not isinstance(content, dict) or not isinstance(content.get("records"), list):
        raise ValueError(f"{path}: allowed is a JSON object with a list named records")
    if content.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema is {content.get('schema')!r}: allowed is {SCHEMA}")
    records: dict[str, Record] = {}
    for i, values in enumerate(content["records"]):
        try:
            record = Record(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: record {i}: {error}") from None
        # setdefault gives the record that already has this name, if there is one.
        if records.setdefault(record.name, record) is not record:
            raise ValueError(f"{path}: two records are named {record.name!r}: allowed is one")
    return list(records.values())


def save(path: Path | str, records: Iterable[Record]) -> None:
    """Write records to a file. If that is interrupted, the old file stays as it was."""
    rows = ",\n".join(json.dumps(dataclasses.asdict(record)) for record in records)
    write_whole(Path(path), f'{{"schema": {SCHEMA}, "records": [\n{rows}\n]}}\n'.encode())
