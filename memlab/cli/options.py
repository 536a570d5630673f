"""Options and results that several commands have."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, overload

from memlab.card.links import LINKS
from memlab.fields import described
from memlab.gpus import GPUS, find_gpu, gpu_of_device
from memlab.spec.recipe import Recipe

if TYPE_CHECKING:
    from memlab.spec.serving import Serving, Workload

LINK = f"between ranks: {', '.join(LINKS)}"
SIZES = "a size such as 22GiB or 24GB, or a number of bytes"
GPU = f"a card's name, {SIZES}; none means no limit"


ANCHOR = "what `memlab measure --json` said on this card: its seconds put right those of the answer"


Commands = Callable[..., Callable[..., argparse.Action]]  # adds one; gives what adds its options


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and whose options have whole names.

    `--rank 8` may be that of an adapter, and would be eight processes.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """One line instead of the whole usage."""
        self.exit(2, f"memlab: {message}\n")


def card(text: str) -> str | int:
    """A card's name, which may be a number (4090), a size, or so many bytes.

    How a size was read, where that is not plain, stands on standard error.
    """
    try:
        found = find_gpu(text)
    except ValueError:
        return text
    if found.name not in GPUS and "(" in found.name:
        print(f"memlab: --gpu {text} is {found.name}", file=sys.stderr)
    return int(text) if text.isdigit() and found.name not in GPUS else text


def anchored_by(file: str | None, gpu: str | int | None) -> tuple[Any, str]:
    """The card with the pace of a measured step, and a line that says so; as it is without."""
    if file is None:
        return gpu, ""
    from memlab.predict.anchor import anchored

    try:
        with open(file, encoding="utf-8") as opened:
            said = json.load(opened)
        recipe, seconds = Recipe(**said["recipe"]), said["step_seconds"]["median"]
        device = said["device"]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is not what `memlab measure --json` prints: {error!r}") from None
    if not isinstance(gpu, str) or gpu_of_device(device) != find_gpu(gpu):
        raise ValueError(f"gpu is {gpu!r}: allowed is the card of {file}, {device}")
    card = anchored(gpu, recipe, seconds)
    size = f"{recipe.batch_size} x {recipe.seq_len}"
    return card, f"seconds times {card.pace:.2f}, by a step of {recipe.model} {size} on {device}"


def count(text: str) -> int:
    """A whole number, with or without commas: 2048, 2,048."""
    if not re.fullmatch(r"[-+]?(\d+|\d{1,3}(,\d{3})+)", text):
        raise argparse.ArgumentTypeError(
            f"it is {text!r}: allowed are whole numbers, such as 4096 or 4,096"
        )
    return int(text.replace(",", ""))


def write(path: str, text: str, over: bool = False) -> None:
    """Write a text file whole or not at all: where there is no room, no empty file is left.

    Raises FileExistsError for a file that is there, unless `over`.
    """
    if os.path.exists(path) and not over:
        raise FileExistsError(f"{path} is there already")
    part = f"{path}.part"
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def minutes(text: str) -> float:
    """A time limit."""
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not limit > 0:
        raise argparse.ArgumentTypeError(f"it is {text!r}: allowed are numbers above 0")
    return limit


def options_of(kind: type[Recipe] | type[Serving]) -> Parser:
    """The options of a `Recipe` or a `Serving`, made from its fields."""
    parser = Parser(add_help=False)
    group = parser.add_argument_group(kind.__name__.lower())
    for field in dataclasses.fields(kind):
        if field.name == "model":
            _add_model(group, field)
        else:
            _add_field(group, field)
    parser.add_argument("--json", action="store_true", help="bytes and seconds as JSON")
    return parser


def _add_model(group: argparse._ArgumentGroup, field: dataclasses.Field[Any]) -> None:
    which = group.add_mutually_exclusive_group()
    which.add_argument("--model", default=field.default, help=field.metadata["help"])
    which.add_argument("--config", dest="model", metavar="PATH", help="a config.json")


def _add_field(group: argparse._ArgumentGroup, field: dataclasses.Field[Any]) -> None:
    said, default = field.metadata, field.default
    name, text = field.name, described(said)
    if default is True:
        name, text = said["off"]
    option = f"--{name.replace('_', '-')}"
    if isinstance(default, bool):
        action = "store_false" if default else "store_true"
        group.add_argument(option, dest=field.name, action=action, help=text)
    elif said["bare"]:
        group.add_argument(option, nargs="?", const=said["bare"], default=default, help=text)
    else:
        kinds: dict[type, Callable[[str], Any]] = {int: count, float: float}
        kind = kinds.get(type(default), str)
        group.add_argument(option, type=kind, default=default, help=text)


def result_of(
    options: argparse.Namespace, recipe: Workload, values: dict[str, Any], shown: object
) -> dict[str, Any]:
    """What a command gives: values for JSON, or text."""
    return values if options.json else {"text": f"{recipe}\n{shown}"}


@overload
def recipe_of(options: argparse.Namespace, kind: type[Recipe] = ...) -> Recipe: ...
@overload
def recipe_of(options: argparse.Namespace, kind: type[Serving]) -> Serving: ...
def recipe_of(options: argparse.Namespace, kind: type[Recipe] | type[Serving] = Recipe) -> Workload:
    """The recipe or the serving that the options say."""
    fields = [field.name for field in dataclasses.fields(kind)]
    return kind(**{name: getattr(options, name) for name in fields})
