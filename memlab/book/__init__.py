"""What the chapters share: figures and tables, texts, exercises, claims, panels, lessons."""

from memlab.lazy import door

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

__getattr__, __all__ = door("memlab.book", _HOMES, ("corpora", "show"))
