"""The register of what memlab replaces in other packages while a card is open or a tracer listens.

All names go through `replaced`, so that they can be listed (`replacements`) and are put back, in
reverse order, whatever ends the block; kernels of PyTorch's dispatcher through `dispatched`.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

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


@contextlib.contextmanager
def dispatched(kernels: Iterable[tuple[str, str, Callable, str]]) -> Iterator[None]:
    """Let functions stand for operators: rows of (package, operator, function, dispatch key)."""
    libraries: dict[str, torch.library.Library] = {}
    try:
        with warnings.catch_warnings():  # that there was one
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for package, operator, function, key in kernels:
                if package not in libraries:
                    libraries[package] = torch.library.Library(package, "IMPL")
                libraries[package].impl(operator, function, key)
        yield
    finally:
        for library in libraries.values():
            library._destroy()
