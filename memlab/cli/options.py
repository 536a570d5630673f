"""Options that several subcommands share, and how their values are read."""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from memlab.card.links import LINKS
from memlab.fields import described
from memlab.gpus import GPUS, find_gpu, gpu_of_device
from memlab.spec.recipe import Recipe

LINK = f"link between ranks: {', '.join(LINKS)}"
SIZES = "a size such as 22GiB or 24GB, or a number of bytes"
GPU = f"a card's name, {SIZES}; without it, memory has no limit"


ANCHOR = "output of `memlab measure --json` on this card; its seconds calibrate those of the answer"


# Adds a subcommand, and returns the function that adds an option to it.
Commands = Callable[..., Callable[..., argparse.Action]]


class Parser(argparse.ArgumentParser):
    """A parser with one-line errors and without abbreviated options.

    An abbreviation can mean the wrong option: `--rank 8`, meant as the rank of an adapter, would be
    read as `--ranks 8`, eight processes.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line, instead of the whole usage."""
        self.exit(2, f"memlab: {message}\n")


def card(text: str) -> str | int:
    """Read the value of --gpu: a GPU's name, which may be a number (4090), a size, or bytes.

    If a size can be read in several ways, the chosen one is printed to standard error. Text that
    `find_gpu` refuses is returned as it is, so that the error comes from the command.
    """
    try:
        gpu = find_gpu(text)
    except ValueError:
        return text
    if gpu.name not in GPUS and "(" in gpu.name:
        print(f"memlab: --gpu {text} is {gpu.name}", file=sys.stderr)
    return int(text) if text.isdigit() and gpu.name not in GPUS else text


def anchored_by(file: str | None, gpu: str | int | None) -> tuple[Any, str]:
    """(the GPU with the pace of a measured step, a line that says so); unchanged without a file.

    file: the output of `memlab measure --json`. Raises ValueError for any other content, and for a
    measurement on another GPU.
    """
    if file is None:
        return gpu, ""
    from memlab.predict.anchor import anchored

    try:
        with open(file, encoding="utf-8") as opened:
            values = json.load(opened)
        recipe, seconds = Recipe(**values["recipe"]), values["step_seconds"]["median"]
        device = values["device"]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is not what `memlab measure --json` prints: {error!r}") from None
    if not isinstance(gpu, str) or gpu_of_device(device) != find_gpu(gpu):
        raise ValueError(f"gpu is {gpu!r}: allowed is {device}, the card of {file}")
    card = anchored(gpu, recipe, seconds)
    size = f"{recipe.batch_size} x {recipe.seq_len}"
    return card, f"seconds times {card.pace:.2f}, as measured for {recipe.model} {size} on {device}"


def count(text: str) -> int:
    """A whole number, with or without commas: 2048, 2,048."""
    if not re.fullmatch(r"[-+]?(\d+|\d{1,3}(,\d{3})+)", text):
        raise argparse.ArgumentTypeError(
            f"invalid value {text!r}: allowed are whole numbers, such as 4096 or 4,096"
        )
    return int(text.replace(",", ""))


def minutes(text: str) -> float:
    """A time limit in minutes, above 0."""
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not limit > 0:
        raise argparse.ArgumentTypeError(f"invalid value {text!r}: allowed are numbers above 0")
    return limit


def options_of(kind: type[Any]) -> Parser:
    """A parent parser with an option for each field of `kind`, a `Recipe` or a `Serving`."""
    parser = Parser(add_help=False)
    group = parser.add_argument_group(kind.__name__.lower())
    for field in dataclasses.fields(kind):
        if field.name == "model":
            which = group.add_mutually_exclusive_group()
            which.add_argument("--model", default=field.default, help=field.metadata["help"])
            which.add_argument("--config", dest="model", metavar="PATH", help="a config.json")
        else:
            _add_field(group, field)
    parser.add_argument("--json", action="store_true", help="print bytes and seconds as JSON")
    return parser


def _add_field(group: argparse._ArgumentGroup, field: dataclasses.Field[Any]) -> None:
    metadata, default = field.metadata, field.default
    name, text = field.name, described(metadata)
    if default is True:  # the option switches the field off, under a name of its own
        name, text = metadata["off"]
    option = f"--{name.replace('_', '-')}"
    if isinstance(default, bool):
        action = "store_false" if default else "store_true"
        group.add_argument(option, dest=field.name, action=action, help=text)
    elif metadata["bare"]:  # the option alone, as in --checkpointing, means this choice
        group.add_argument(option, nargs="?", const=metadata["bare"], default=default, help=text)
    else:
        kinds: dict[type, Callable[[str], Any]] = {int: count, float: float}
        kind = kinds.get(type(default), str)
        group.add_argument(option, type=kind, default=default, help=text)


def recipe_of(options: argparse.Namespace, kind: type[Any] = Recipe) -> Any:
    """The `Recipe` or the `Serving` that the parsed options describe."""
    return kind(**{field.name: getattr(options, field.name) for field in dataclasses.fields(kind)})
