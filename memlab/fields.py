"""What a field of a recipe says of itself: its help, its choices, its check, its option.

A check gives the value in its one form, or raises ValueError: field, value, what is allowed.
"""

from __future__ import annotations

import dataclasses
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
Choices = tuple[object, ...] | dict[str, str]  # values, or each with what it means
Check = Callable[[str, Any], object]  # of a field's name and what somebody gave for it


@dataclasses.dataclass(frozen=True)
class Needs:
    """What another field has to be for a field to have an effect.

    name: of the other field. met: whether its value is one that does. allowed: those, in words.
    """

    name: str
    met: Callable[[Any], bool]
    allowed: str


def field(
    default: T,
    help: str,
    choices: Choices = (),
    check: Check | None = None,
    off: tuple[str, str] | None = None,
    bare: str | None = None,
    needs: Needs | None = None,
) -> T:
    """A dataclass field that carries what is said of it.

    choices: the values that are allowed, or value -> what it means. off: of a switch that is on by
    default, the name of the option that turns it off, and what that means. bare: the choice that
    is meant by True, and by the option or the word alone; False means the default. needs: without
    which any value but the default is refused, as it would have no effect.
    """
    said = {"help": help, "choices": choices, "check": check, "off": off, "bare": bare}
    return dataclasses.field(default=default, metadata=said | {"needs": needs})


def switch(
    default: bool, help: str, off: tuple[str, str] | None = None, needs: Needs | None = None
) -> bool:
    """A field that is True or False."""
    return field(default, help, (True, False), off=off, needs=needs)


def described(said: Mapping[str, Any]) -> str:
    """Choices and help of a field's metadata, as one text."""
    choices = said["choices"]
    meanings = choices if isinstance(choices, dict) else dict.fromkeys(choices)
    listed = [
        f"{choice} ({meaning})" if meaning else str(choice)
        for choice, meaning in meanings.items()
        if isinstance(choice, (str, int)) and not isinstance(choice, bool)
    ]
    text = ": ".join(filter(None, [said["help"], ", ".join(listed)]))
    return f"{text}; or {said['off'][1]}" if said["off"] else text


def without_effect(values: DataclassInstance, changes: dict[str, Any]) -> dict[str, Any]:
    """The defaults of the fields that have no effect any more once `changes` are made to values.

    Fields that `changes` names are left to it.
    """
    defaults = {}
    for one in dataclasses.fields(values):
        needs = one.metadata["needs"]
        if needs and one.name not in changes and needs.name in changes:
            if not needs.met(changes[needs.name]):
                defaults[one.name] = one.default
    return defaults


def check_effects(values: DataclassInstance) -> None:
    """Raise ValueError for a field that another one leaves without an effect."""
    for one in dataclasses.fields(values):
        needs, value = one.metadata["needs"], getattr(values, one.name)
        if needs and value != one.default and not needs.met(getattr(values, needs.name)):
            other = getattr(values, needs.name)
            raise ValueError(
                f"{one.name} is {value!r} and {needs.name} is {other!r}: it has no effect there, "
                f"allowed is {one.default!r}, or {needs.allowed}"
            )


def documentation(recipe: type[DataclassInstance]) -> str:
    """The part of a docstring that lists the fields of a dataclass made of `field`."""
    lines = []
    for one in dataclasses.fields(recipe):
        text = f"{one.name}: {described(one.metadata)} (default {one.default!r})."
        lines += textwrap.wrap(
            text, 92, initial_indent="    ", subsequent_indent="        ", break_on_hyphens=False
        )
    return "\n".join(lines)


# ---------------------------------------------------------------------- checks


def invalid_value(name: str, value: object, allowed: str) -> ValueError:
    """The error of a value that a field does not allow."""
    return ValueError(f"{name} is {value!r}: allowed are {allowed}")


def one_of(name: str, value: T, choices: Iterable[object]) -> T:
    """A value that is one of the choices."""
    if value not in tuple(choices):  # a list is in no dictionary
        raise invalid_value(name, value, ", ".join(map(str, choices)))
    return value


MOST = 10**9  # of anything that is counted
MOST_MICRO_BATCHES = 2**17  # of a step, each with tokens that wait on the card


def integer_from(least: int, most: int = MOST) -> Callable[[str, object], int]:
    """The check of whole numbers from `least` to `most`."""

    def check(name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise invalid_value(name, value, f"whole numbers from {least}")
        if value > most:
            raise invalid_value(name, value, f"whole numbers from {least} to {most:,}")
        return value

    return check


SIZE = re.compile(r"(num|n)_\w+|\w+_(size|dim)")  # fields of a config that count something
OF_ANY_MODEL = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads")
MOST_LAYERS = 1000  # that are built one by one


def check_sizes(config: Mapping[str, object]) -> None:
    """Raise ValueError for a size in a config's values that no model has."""
    for name, value in config.items():
        needed = name in OF_ANY_MODEL
        none = value == -1 and not needed  # as some write it
        if SIZE.fullmatch(name) and type(value) is int and not none:
            layers = re.fullmatch(r"(num|n)_(hidden_)?layers?", name)
            integer_from(int(needed), MOST_LAYERS if layers else MOST)(name, value)


def fraction(name: str, value: object) -> float:
    """A number from 0 to below 1."""
    if not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise invalid_value(name, value, "numbers from 0 to below 1")
    return value


def from_zero(name: str, value: object) -> float:
    """A finite number from 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise invalid_value(name, value, "numbers from 0")
    return value


def module_names(name: str, value: Any) -> str | tuple[str, ...]:
    """`all-linear`, or a tuple of names; a text with commas is taken apart."""
    names = value if value == "all-linear" else _words(value) if isinstance(value, str) else value
    names = names if isinstance(names, str) else tuple(names)
    if not names or not all(isinstance(target, str) for target in names):
        raise invalid_value(name, value, "all-linear or names of modules")
    return names


def model_parts(name: str, value: Any) -> tuple[int | str, ...]:
    """A tuple of whole numbers and names; a text with commas is taken apart."""
    parts = _words(value) if isinstance(value, str) else value
    parts = [parts] if isinstance(parts, int) else parts
    parts = tuple(int(p) if isinstance(p, str) and p.isdigit() else p for p in parts)
    for part in parts:
        number = isinstance(part, int) and not isinstance(part, bool) and part >= 0
        if not number and not (isinstance(part, str) and part[:1] not in "-+"):
            raise ValueError(
                f"{name} holds {part!r}: allowed are embeddings, backbone, a number of layers "
                "from 0, and names of modules"
            )
    return parts


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
