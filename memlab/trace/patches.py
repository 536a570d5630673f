"""The register of what memlab replaces in other packages while a card is open or a tracer listens.

All of it goes through `replaced`, so that it can be listed (`replacements`) and is put back, in
reverse order, whatever ends the block. Kernels of the dispatcher are `memlab.card.kernels.rules`'.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

MISSING = object()


class Replacement(NamedTuple):
    """A name of a module or a class that stands for something else.

    original: what it stood for; `MISSING` where there was no such name.
    """

    target: Any
    name: str
    original: Any


_OPEN: list[Replacement] = []


def replacements() -> tuple[Replacement, ...]:
    """What is replaced now, the first first."""
    return tuple(_OPEN)


@contextlib.contextmanager
def replaced(*rows: tuple[Any, str, Any], create: bool = False) -> Iterator[None]:
    """Let names stand for other objects: rows of (target, name, replacement).

    create: whether a name need not be there. Otherwise AttributeError, which says that a release
    of that package does not have it.
    """
    with contextlib.ExitStack() as stack:
        for target, name, replacement in rows:
            change = Replacement(target, name, getattr(target, name, MISSING))
            stack.enter_context(mock.patch.object(target, name, replacement, create=create))
            _OPEN.append(change)
            stack.callback(_close, change)
        yield


def _close(replacement: Replacement) -> None:
    del _OPEN[next(i for i, other in enumerate(_OPEN) if other is replacement)]
