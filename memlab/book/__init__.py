"""What the chapters share: figures and tables, texts, lessons, exercises, claims, panels."""

from memlab.lazy import door

_HOMES = {
    "AblationPanel": "ablation",
    "AllocatorSandbox": "sandbox",
    "BitExplorer": "bits",
    "Calculator": "calculator",
    "Film": "film",
    "FreezingPanel": "freezing",
    "LoaderLanes": "loading",
    "PaddingExplorer": "panels",
    "Planner": "planner",
    "QuantizationRuler": "ruler",
    "RunningSoftmax": "softmax",
    "SegmentFilm": "segments",
    "TilePlayer": "panels",
    "named": "claims",
    "verdict": "claims",
    "QUIET": "lessons",
    "estimated_run": "lessons",
    "in_turns": "lessons",
    "shuffled_blocks": "lessons",
    "small_config": "lessons",
    "three_steps": "lessons",
    "train_on": "lessons",
    "train_step": "lessons",
    "trainer_losses": "lessons",
}
__getattr__, __dir__, __all__ = door("memlab.book", _HOMES, ("corpora", "show"))
