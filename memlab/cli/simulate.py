"""`memlab simulate`: predict an optimizer step on a GPU that need not be there."""

import sys
from argparse import Namespace
from dataclasses import replace
from typing import Any

from memlab.card.links import link_rate
from memlab.cli.options import ANCHOR, LINK, Commands, anchored_by, card, options_of, recipe_of
from memlab.cli.options import GPU as CARD
from memlab.cli.verdict import TOO_SMALL, is_out_of_memory, verdict_line, verdict_values
from memlab.gpus import GPU, find_gpu
from memlab.planner.result import way_in_words
from memlab.spec.recipe import QUANTIZED, Recipe
from memlab.spec.serving import Workload
from memlab.units import in_unit_of


def add_to(commands: Commands) -> None:
    """Add the command with the options of a recipe."""
    help = "predict an optimizer step on a simulated GPU"
    add = commands("simulate", run, help, [options_of(Recipe)])
    add("--gpu", type=card, help=CARD)
    add("--link", help=LINK)
    add("--anchor", metavar="FILE", help=ANCHOR)
    sizes = ("batch-size", "seq-len")
    add("--largest", choices=sizes, help="use the largest one that fits the card, as plan does")


def run(options: Namespace) -> dict:
    """Predict the footprint of a recipe."""
    return simulated(recipe_of(options), options, options.link)


def simulated(recipe: Workload, options: Namespace, link: str | None = None) -> dict:
    """Predict a recipe or a serving, at its own size or at the largest that fits.

    options: of the command, with `gpu`, `largest` and `json`, and perhaps `anchor`. link: between
    ranks, as in `simulate`.
    """
    answer: Any = None
    gpu, anchor = anchored_by(getattr(options, "anchor", None), options.gpu)
    if options.largest:
        from memlab.predict.fit import largest

        answer = largest(recipe, gpu, options.largest.replace("-", "_"))
        recipe = answer.recipe
        if not answer.value:  # not even the smallest size fits: there is nothing to simulate
            values: dict[str, Any] = (
                {"largest": answer.as_dict()} if options.json else {"text": str(answer)}
            )
            return values | {"status": TOO_SMALL}
    card = find_gpu(gpu)
    footprint, fit, error = _on_card(recipe, card, link)
    other = _other_upcast(recipe, card, footprint)
    values = {
        type(recipe).__name__.lower(): recipe.as_dict(),
        "gpu": options.gpu,
        "verdict": verdict_values(card, fit),
    }
    values |= footprint.as_dict() if footprint else {"error": error}
    values |= {"largest": answer.as_dict()} if answer else {}
    if options.json:
        from memlab.predict.measure import versions  # it brings PyTorch

        values["versions"] = versions()
    values |= {"anchor": anchor} if anchor else {}
    name = recipe.model_name
    if isinstance(recipe, Recipe) and recipe.lora_rank:
        name = f"{name}, {way_in_words(recipe)}"
    first = f"{name}: no card is named (--gpu)"
    if fit is not None:
        first = verdict_line(name, card, fit)
    parts = (first, answer, recipe, footprint, other, anchor)
    shown = "\n".join(str(part) for part in parts if part)
    if error:
        print(f"memlab: {error}", file=sys.stderr)
    status = {"status": 0 if fit is None or fit.fits else TOO_SMALL}
    return (values if options.json else {"text": shown}) | status


def _on_card(recipe: Workload, card: GPU, link: str | None) -> tuple[Any, Any, str]:
    """(footprint, fit, error) of a recipe on a GPU.

    fit is None for a GPU without a memory limit, footprint is None if the recipe runs out of
    memory; then error is PyTorch's message.
    """
    from memlab.predict.fit import fit_from_log
    from memlab.predict.simulate import full_log, simulate

    if card.total_memory is None:
        return simulate(recipe, card, link), None, ""
    if link is not None:
        link_rate(card, link)  # raises ValueError for a link that the GPU lacks
    fit = fit_from_log(recipe, full_log(recipe, card), card, link=link)
    if fit.fits:
        return fit.footprint, fit, ""
    # It does not fit with the margin. On the GPU's real size it may run all the same.
    try:
        footprint = simulate(recipe, card, link)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None, fit, str(error)
    # The allocator gave cached blocks back at the limit, so it reserved less than without one.
    needed = (footprint.peak_reserved or 0) + (card.context or 0)
    return footprint, replace(fit, needed=needed), ""


def _other_upcast(recipe: Workload, card: GPU, footprint: Any) -> str:
    """A line on what a quantized base reserves with the other value of `upcast`; else empty.

    upcast decides whether the rest that is not quantized is cast to fp32. Both are simulated
    without a memory limit.
    """
    if not (footprint and isinstance(recipe, Recipe) and recipe.base in QUANTIZED):
        return ""
    from memlab.predict.simulate import simulate

    # Without a limit: the other format may not fit, and its bytes are wanted all the same.
    other = simulate(recipe.but(upcast=not recipe.upcast), card.without_limit()).peak_reserved or 0
    more = other - footprint.peak_reserved
    option = "with --no-upcast" if recipe.upcast else "without --no-upcast"
    return f"{option}: {in_unit_of(abs(more), other)} {'more' if more > 0 else 'less'} reserved"
