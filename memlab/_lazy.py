"""Names of a package that are loaded when they are first asked for."""

from collections.abc import Callable
from importlib import import_module


def door(
    package: str, homes: dict[str, str], modules: tuple[str, ...]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package (PEP 562).

    homes: name -> the module below the package that defines it. modules: its own modules that are
    names, too.
    """

    def load(name: str) -> object:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name in homes:
            return getattr(import_module(f"{package}.{homes[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    names = sorted([*homes, *modules])
    return load, lambda: names, names
