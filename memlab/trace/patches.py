"""The register of everything that memlab replaces in other packages during a simulation or a trace.

Names are replaced by `replaced` alone, and kernels of PyTorch's dispatcher by `dispatched`. Both
undo their changes in reverse order, whatever ends the block. `replacements` lists the names that
are replaced at the moment.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

MISSING = object()


class Replacement(NamedTuple):
    """An attribute of a module or class that has been replaced.

    original: its value before; `MISSING` if there was no such attribute.
    """

    target: Any
    name: str
    original: Any


_OPEN: list[Replacement] = []


def replacements() -> tuple[Replacement, ...]:
    """The open replacements, the oldest first."""
    return tuple(_OPEN)


@contextlib.contextmanager
def replaced(*rows: tuple[Any, str, Any], create: bool = False) -> Iterator[None]:
    """Replace attributes inside the block; rows: (target, name, replacement).

    create: whether an attribute may be missing, and is then created. Otherwise a missing one raises
    AttributeError: the installed release of that package does not have it.
    """
    with contextlib.ExitStack() as stack:
        for target, name, replacement in rows:
            change = Replacement(target, name, getattr(target, name, MISSING))
            stack.enter_context(mock.patch.object(target, name, replacement, create=create))
            _OPEN.append(change)
            stack.callback(_close, change)
        yield


def _close(replacement: Replacement) -> None:
    # By identity: targets may define `==`, and the same name may be replaced twice.
    del _OPEN[next(i for i, other in enumerate(_OPEN) if other is replacement)]


@contextlib.contextmanager
def dispatched(kernels: Iterable[tuple[str, str, Callable, str]]) -> Iterator[None]:
    """Register kernels inside the block; rows: (package, operator, function, dispatch key)."""
    libraries: dict[str, torch.library.Library] = {}
    try:
        # PyTorch warns that a kernel was already registered, which is the point.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for package, operator, function, key in kernels:
                if package not in libraries:
                    libraries[package] = torch.library.Library(package, "IMPL")
                libraries[package].impl(operator, function, key)
        yield
    finally:
        for library in libraries.values():
            library._destroy()  # restores the kernels that were registered before
