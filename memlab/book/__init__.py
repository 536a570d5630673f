"""What the chapters share: figures and tables, texts, exercises, claims, panels, lessons."""

from importlib import import_module

_HOMES = {
    "FORMATS": "bits",
    "BitExplorer": "bits",
    "Film": "film",
    "PaddingExplorer": "panels",
    "TilePlayer": "panels",
    "verdict": "claims",
}
_LOOPS = "QUIET in_turns shuffled_blocks small_config three_steps train_on train_step"
_HOMES |= dict.fromkeys([*_LOOPS.split(), "trainer_losses"], "lessons")
_MODULES = ("corpora", "show")
__all__ = sorted([*_HOMES, *_MODULES])


def __getattr__(name):
    if name in _MODULES:
        return import_module(f"memlab.book.{name}")
    if name in _HOMES:
        return getattr(import_module(f"memlab.book.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'memlab.book' has no attribute {name!r}")
