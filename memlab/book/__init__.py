"""What the chapters share: figures and tables, texts, lessons, exercises, claims, panels."""

from typing import TYPE_CHECKING

from memlab._lazy import door

if TYPE_CHECKING:  # the names below, as checkers see nothing of what `__getattr__` serves
    from memlab.book import corpora as corpora
    from memlab.book import show as show
    from memlab.book.calculator import Calculator as Calculator
    from memlab.book.chapters.ablation import AblationPanel as AblationPanel
    from memlab.book.chapters.bits import BitExplorer as BitExplorer
    from memlab.book.chapters.film import Film as Film
    from memlab.book.chapters.freezing import FreezingPanel as FreezingPanel
    from memlab.book.chapters.loading import LoaderLanes as LoaderLanes
    from memlab.book.chapters.panels import PaddingExplorer as PaddingExplorer
    from memlab.book.chapters.panels import TilePlayer as TilePlayer
    from memlab.book.chapters.ruler import QuantizationRuler as QuantizationRuler
    from memlab.book.chapters.sandbox import AllocatorSandbox as AllocatorSandbox
    from memlab.book.chapters.segments import SegmentFilm as SegmentFilm
    from memlab.book.chapters.softmax import RunningSoftmax as RunningSoftmax
    from memlab.book.claims import named as named
    from memlab.book.claims import verdict as verdict
    from memlab.book.lessons import QUIET as QUIET
    from memlab.book.lessons import estimated_run as estimated_run
    from memlab.book.lessons import in_turns as in_turns
    from memlab.book.lessons import shuffled_blocks as shuffled_blocks
    from memlab.book.lessons import small_config as small_config
    from memlab.book.lessons import three_steps as three_steps
    from memlab.book.lessons import train_on as train_on
    from memlab.book.lessons import train_step as train_step
    from memlab.book.lessons import trainer_losses as trainer_losses
    from memlab.book.planner_form import Planner as Planner

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
if not TYPE_CHECKING:  # to checkers any name would be one of the package
    __getattr__, __dir__, __all__ = door("memlab.book", _HOMES, ("corpora", "show"))
