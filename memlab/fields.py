"""What a field of a recipe says of itself: its help, its choices, its check, its option.

A check gives the value in its one form, or raises ValueError: field, value, what is allowed.
"""

import dataclasses
import math
import textwrap
from collections.abc import Callable


def field(default, help: str, choices=(), check: Callable | None = None, off=None, bare=None):
    """A dataclass field that carries what is said of it.

    choices: the values that are allowed, or value -> what it means. off: of a switch that is on by
    default, the name of the option that turns it off, and what that means. bare: the choice that
    is meant by True, and by the option or the word alone; False means the default.
    """
    said = {"help": help, "choices": choices, "check": check, "off": off, "bare": bare}
    return dataclasses.field(default=default, metadata=said)


def switch(default: bool, help: str, off: tuple[str, str] | None = None):
    """A field that is True or False."""
    return field(default, help, (True, False), off=off)


def described(said) -> str:
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


def documentation(recipe) -> str:
    """The part of a docstring that lists the fields of a dataclass made of `field`."""
    lines = []
    for one in dataclasses.fields(recipe):
        text = f"{one.name}: {described(one.metadata)} (default {one.default!r})."
        lines += textwrap.wrap(
            text, 92, initial_indent="    ", subsequent_indent="        ", break_on_hyphens=False
        )
    return "\n".join(lines)


# ---------------------------------------------------------------------- checks


def wrong(name, value, allowed) -> ValueError:
    """The error of a value that a field does not allow."""
    return ValueError(f"{name} is {value!r}: allowed are {allowed}")


def one_of(name, value, choices):
    """A value that is one of the choices."""
    if value not in tuple(choices):  # a list is in no dictionary
        raise wrong(name, value, ", ".join(map(str, choices)))
    return value


def whole(least: int) -> Callable:
    """The check of whole numbers from `least` on."""

    def check(name, value):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise wrong(name, value, f"whole numbers from {least}")
        return value

    return check


def share(name, value):
    """A number from 0 to below 1."""
    if not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise wrong(name, value, "numbers from 0 to below 1")
    return value


def from_zero(name, value):
    """A finite number from 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value < math.inf:
        raise wrong(name, value, "numbers from 0")
    return value


def module_names(name, value):
    """`all-linear`, or a tuple of names; a text with commas is taken apart."""
    names = value if value == "all-linear" else _words(value) if isinstance(value, str) else value
    names = names if isinstance(names, str) else tuple(names)
    if not names or not all(isinstance(target, str) for target in names):
        raise wrong(name, value, "all-linear or names of modules")
    return names


def model_parts(name, value) -> tuple:
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


def _words(text: str) -> tuple:
    return tuple(word.strip() for word in text.split(",") if word.strip())
