"""`memlab plan`: how to train a model on a GPU, or which GPU to choose."""

import dataclasses
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from memlab.cli.options import ANCHOR, LINK, SIZES, Commands, anchored_by, card, count
from memlab.libraries import write_whole
from memlab.spec.recipe import Recipe

# Fields of `memlab.planner.result.Question` with an option of the same name.
ASKED = "seq_len effective_batch ways precisions keep_quality lora_rank task ranks link "
ASKED += "expandable_segments"


def add_to(commands: Commands) -> None:
    """Add the command with the options of a question."""
    add = commands("plan", run, "how to train a model on a card, or which card to choose")
    help_of = {field.name: field.metadata["help"] for field in dataclasses.fields(Recipe)}
    add("--model", "--config", required=True, help=help_of["model"])
    cards = f"a card's name, {SIZES}; several, or none for all, ask which card to choose"
    add("--gpu", type=card, nargs="+", default=[], help=cards)
    add("--seq-len", type=count, default=512, help=help_of["seq_len"])
    add("--effective-batch", type=count, default=16, help="sequences per optimizer step")
    add(
        "--ways",
        default="full,lora,qlora",
        help="ways to train that may be used, the preferred one first",
    )
    add(
        "--precisions",
        help="precisions that may be used, with commas; by default those that the card is made for",
    )
    quality = "also allow what may train worse: pure half precision, SGD, Lion"
    add("--any-quality", dest="keep_quality", action="store_false", help=quality)
    add("--lora-rank", type=count, default=16, help="rank of the LoRA adapters, from 1")
    add("--task", help=help_of["task"])
    add("--ranks", type=count, default=1, help="number of cards of this kind that train together")
    add("--link", help=LINK)
    add("--anchor", metavar="FILE", help=ANCHOR)
    add("--expandable-segments", action="store_true", help=help_of["expandable_segments"])
    add("--margin", type=float, help="share of the predicted bytes to keep free; by default 0.05")
    script = "write a training script of the fastest recipe, or of a last resort if only that fits"
    add("--script", metavar="FILE", help=script)
    add(
        "--api",
        default="trainer",
        choices=("trainer", "accelerate"),
        help="library that the script uses",
    )
    add("--force", action="store_true", help="overwrite an existing file with the script")
    add("--json", action="store_true", help="print the plan as JSON")


def run(options: Namespace) -> dict:
    """Make a plan, and with --script write a training script of its fastest recipe.

    If only a last resort fits, the script is of that one.
    """
    from memlab.planner.search import plan

    asked = {name: getattr(options, name) for name in ASKED.split()}
    if options.margin is not None:
        asked["margin"] = options.margin
    if options.script:  # refuse before the search, which takes minutes
        if len(options.gpu) != 1 or options.ranks > 1:
            raise ValueError("a script is for one card: name one with --gpu, without --ranks")
        if Path(options.script).exists() and not options.force:
            raise ValueError(f"{options.script} exists already: --force overwrites it")
        if not os.access(Path(options.script).parent, os.W_OK):
            why = "no such folder, or no permission"
            raise ValueError(f"{options.script} cannot be written: {why}")
    # One GPU asks how to train on it; several, or none for all of the list, ask which to choose.
    (cards,) = options.gpu if len(options.gpu) == 1 else (options.gpu or None,)
    cards, anchor = anchored_by(options.anchor, cards)
    answer = plan(options.model, cards, **asked)
    short = _shortfall(answer)
    chance = f"Chance that {short[0]} does not fit: {short[1]}.\n" if short else ""
    text = f"{answer}\n{chance}{anchor}".rstrip()
    option = answer.fastest or next(iter(answer.last_resorts), None) if options.script else None
    more: dict = {"script": options.script if option else None}
    status = 0 if answer else 3
    if option:
        try:
            text = f"{text}\n{_write_script(option.recipe, options)}"
        except OSError as error:  # show the plan all the same: it took minutes
            text, status = f"{text}\n{options.script} was not written: {error.strerror}", 2
            more = {"script": None, "not_written": str(error)}
    more |= {"anchor": anchor} if anchor else {}
    more |= {"chance_that_it_does_not_fit": short[1].chance} if short else {}
    values = answer.as_dict() | more if options.json else {"text": text}
    return values | {"status": status}


def _shortfall(answer: Any) -> tuple | None:
    """(the first tier that fits, the share of published runs that would not); None if none fits.

    A plan for several GPUs has no first tier, and so gives None.
    """
    option = getattr(answer, "first", None)
    if option is None:
        return None
    from memlab.evidence.shortfall import shortfall

    return f"tier {option.tier}", shortfall(option.needed, option.total_memory)


def _write_script(recipe: Recipe, options: Namespace) -> str:
    from memlab.export.training_script import api_of, pip_line, training_script
    from memlab.planner.result import described

    api = api_of(recipe, options.api)
    text = training_script(recipe, api)
    write_whole(Path(options.script), text.encode())
    return f"Written to {options.script}: {described(recipe)}; it needs: {pip_line(recipe, api)}"
