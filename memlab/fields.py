"""Declared dataclass fields: each carries its help, choices, check and command-line option.

`Recipe` and `Serving` are built from these fields. Their docstrings, the options of the command
line and the validation all read the same metadata. A check takes a field's name and value. It
returns the value in normal form, or raises ValueError with the field, the value and what is
allowed, in one line.
"""

from __future__ import annotations

import dataclasses
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
Choices = tuple[object, ...] | dict[str, str]  # allowed values, or value -> meaning
Check = Callable[[str, Any], object]  # (field's name, given value) -> value in normal form


@dataclasses.dataclass(frozen=True)
class Needs:
    """A condition on another field, without which a field has no effect.

    name: the other field.
    met: whether a value of the other field meets the condition.
    allowed: the values that meet the condition, in words for an error message.
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
    """A dataclass field with its documentation and validation in `metadata`.

    choices: the allowed values, or a dictionary value -> meaning.
    off: for a switch that is on by default, the option that turns it off and that option's meaning.
    bare: the choice that True stands for, and an option without a value; False is the default.
    needs: a condition on another field; unless it is met, only the default is allowed.
    """
    metadata = {"help": help, "choices": choices, "check": check, "off": off, "bare": bare}
    return dataclasses.field(default=default, metadata=metadata | {"needs": needs})


def switch(
    default: bool, help: str, off: tuple[str, str] | None = None, needs: Needs | None = None
) -> bool:
    """A field whose value is True or False; `off` and `needs` as for `field`."""
    return field(default, help, (True, False), off=off, needs=needs)


def described(metadata: Mapping[str, Any]) -> str:
    """The help of a field with its choices and their meanings, as one text."""
    choices = metadata["choices"]
    meanings = choices if isinstance(choices, dict) else dict.fromkeys(choices)
    listed = [
        f"{choice} ({meaning})" if meaning else str(choice)
        for choice, meaning in meanings.items()
        if isinstance(choice, (str, int)) and not isinstance(choice, bool)
    ]
    text = ": ".join(filter(None, [metadata["help"], ", ".join(listed)]))
    return f"{text}; or {metadata['off'][1]}" if metadata["off"] else text


@dataclasses.dataclass(frozen=True)
class CheckedFields:
    """Base of `Recipe` and `Serving`: a dataclass whose fields come from `field`."""

    model: Any

    def check_fields(self) -> None:
        """Bring each field into its normal form.

        Raises ValueError for a value that is not allowed, and for a value without an effect.
        """
        for spec in dataclasses.fields(self):
            value, rules = getattr(self, spec.name), spec.metadata
            if rules["bare"] and isinstance(value, bool):
                value = rules["bare"] if value else spec.default
            if rules["choices"]:
                one_of(spec.name, value, rules["choices"])
            elif rules["check"]:
                value = rules["check"](spec.name, value)
            object.__setattr__(self, spec.name, value)  # the dataclass is frozen
        # Only now: a condition may look at any field, so all must be in normal form.
        for spec, needs in self._without_effect(vars(self)):
            value, other = getattr(self, spec.name), getattr(self, needs.name)
            if value != spec.default:
                raise ValueError(
                    f"{spec.name} is {value!r} and {needs.name} is {other!r}: it has no effect "
                    f"then, allowed is {spec.default!r}, or {needs.allowed}"
                )

    def _without_effect(self, values: Mapping[str, Any]) -> list[tuple[dataclasses.Field, Needs]]:
        """The fields that have no effect with these values, each with its unmet condition."""
        pairs = [(spec, spec.metadata["needs"]) for spec in dataclasses.fields(self)]
        return [
            (spec, needs) for spec, needs in pairs if needs and not needs.met(values[needs.name])
        ]

    def but(self, **changes: Any) -> Self:
        """A copy with some fields changed; fields that lose their effect return to the default."""
        names = [spec.name for spec in dataclasses.fields(self)]
        for name in changes:
            if name not in names:
                kind = type(self).__name__.lower()
                raise ValueError(f"a {kind} has no field {name!r}: allowed are {', '.join(names)}")
        idle = self._without_effect(vars(self) | changes)
        defaults = {spec.name: spec.default for spec, _ in idle}
        return dataclasses.replace(self, **defaults | changes)

    @property
    def model_name(self) -> str:
        """The model as a short text for tables: its name, or the model type of a config."""
        from memlab.models import published

        return self.model if isinstance(self.model, str) else published(self.model).model_type

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return vars(self) | {"model": self.model_name}

    def __str__(self) -> str:
        shown = []
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if spec.name in ("model", "task") or value != spec.default:
                value = self.model_name if spec.name == "model" else value
                shown.append(f"{spec.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


def documentation(recipe: type[DataclassInstance]) -> str:
    """The list of fields for the docstring of a dataclass that is built from `field`."""
    lines = []
    for spec in dataclasses.fields(recipe):
        text = f"{spec.name}: {described(spec.metadata)} (default {spec.default!r})."
        lines += textwrap.wrap(
            text, 92, initial_indent="    ", subsequent_indent="        ", break_on_hyphens=False
        )
    return "\n".join(lines)


# ---------------------------------------------------------------------- checks


def invalid_value(name: str, value: object, allowed: str) -> ValueError:
    """The error for a value that a field does not allow; the caller raises it."""
    return ValueError(f"{name} is {value!r}: allowed are {allowed}")


def one_of(name: str, value: T, choices: Iterable[object]) -> T:
    """The value. Raises ValueError if it is not one of the choices."""
    if value not in tuple(choices):  # a tuple, because a list as value is not hashable
        raise invalid_value(name, value, ", ".join(map(str, choices)))
    return value


MOST = 10**9  # the largest count that any field allows
MOST_MICRO_BATCHES = 2**17  # per step; the tokens of all of them wait on the GPU


def integer_from(least: int, most: int = MOST) -> Callable[[str, object], int]:
    """A check for whole numbers from `least` to `most`; True and False are no numbers."""

    def check(name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise invalid_value(name, value, f"whole numbers from {least}")
        if value > most:
            raise invalid_value(name, value, f"whole numbers from {least} to {most:,}")
        return value

    return check


SIZE = re.compile(r"(num|n)_\w+|\w+_(size|dim)")  # config fields that hold a size or a count
# Sizes that every model has: at least 1. Other sizes may be 0.
OF_ANY_MODEL = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads")
MOST_LAYERS = 1000  # transformers builds layers one by one, which would take for ever with 10**9


def check_sizes(config: Mapping[str, object]) -> None:
    """Raise ValueError if a size among a config's values is one that no model has."""
    for name, value in config.items():
        needed = name in OF_ANY_MODEL
        none = value == -1 and not needed  # some configs write -1 for "none"
        if SIZE.fullmatch(name) and type(value) is int and not none:
            layers = re.fullmatch(r"(num|n)_(hidden_)?layers?", name)
            integer_from(int(needed), MOST_LAYERS if layers else MOST)(name, value)


def fraction(name: str, value: object) -> float:
    """A check for numbers from 0 to below 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise invalid_value(name, value, "numbers from 0 to below 1")
    return value


def from_zero(name: str, value: object) -> float:
    """A check for finite numbers from 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise invalid_value(name, value, "numbers from 0")
    return value


def module_names(name: str, value: Any) -> str | tuple[str, ...]:
    """A check for module names: `all-linear`, or a tuple; a text is split at its commas."""
    names = value if value == "all-linear" else _words(value)
    if not names or not all(isinstance(target, str) for target in names):
        raise invalid_value(name, value, "all-linear or names of modules")
    return names


def model_parts(name: str, value: Any) -> tuple[int | str, ...]:
    """A check for parts of a model: a tuple of whole numbers and names.

    A text is split at its commas; a single number counts as a tuple of one.
    """
    parts = tuple(map(str, [value] if isinstance(value, int) else _words(value)))
    for part in parts:
        if not re.fullmatch(r"\d+|[^-+\d].*", part):
            raise ValueError(
                f"{name} holds {part!r}: allowed are embeddings, backbone, a number of layers "
                "from 0, and names of modules"
            )
    return tuple(int(part) if part.isdigit() else part for part in parts)


def _words(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, str):
        return tuple(value)
    return tuple(word.strip() for word in value.split(",") if word.strip())
