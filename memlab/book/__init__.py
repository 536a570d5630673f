"""What the chapters share: figures and tables, texts, lessons, exercises, claims, panels."""

from memlab._lazy import door

_HOMES = {
    "AblationPanel": "chapters.ablation",
    "AllocatorSandbox": "chapters.sandbox",
    "BitExplorer": "chapters.bits",
    "Calculator": "calculator",
    "Film": "chapters.film",
    "FreezingPanel": "chapters.freezing",
    "LoaderLanes": "chapters.loading",
    "PaddingExplorer": "chapters.panels",
    "Planner": "planner_form",
    "QuantizationRuler": "chapters.ruler",
    "RunningSoftmax": "chapters.softmax",
    "SegmentFilm": "chapters.segments",
    "TilePlayer": "chapters.panels",
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
