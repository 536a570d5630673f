"""`memlab run`: run a training script on a simulated GPU."""

import sys
from argparse import Namespace
from typing import Any

from memlab.cli.options import GPU as CARD
from memlab.cli.options import Commands, card, count, minutes
from memlab.cli.verdict import verdict_line, verdict_values
from memlab.gpus import GPU, find_gpu
from memlab.units import in_unit_of


def add_to(commands: Commands) -> None:
    """Add the command."""
    add = commands("run", run, "run a training script on a simulated GPU")
    add("script", help="a Python script, unchanged; its own arguments go last, after --")
    add("--gpu", type=card, help=CARD)
    add("--steps", type=count, default=2, help="optimizer steps after which the script is ended")
    add("-m", dest="module", action="store_true", help="the script is a module, as for `python -m`")
    launched = (
        "run as the first of this many processes of torchrun; by default as plain python does"
    )
    add("--ranks", type=count, help=launched)
    add(
        "--limit-minutes",
        type=minutes,
        default=float("inf"),
        help="minutes after which it is stopped",
    )
    eager = "run code uncompiled that torch.compile would compile: mostly more bytes, but no bound"
    add("--compile-eagerly", action="store_true", help=eager)
    phases = "transformers' Trainer trains on its longest texts, then evaluates and saves once"
    add("--phases", action="store_true", help=phases)
    add("--snapshot", metavar="FILE", help="file to write for pytorch.org/memory_viz")
    add("--json", action="store_true", help="print bytes as JSON")


def run(options: Namespace) -> dict:
    """Run the script, print its error if it has one, and return what it took."""
    from memlab.predict.script import FAILED, traceback_of, try_script

    ran = try_script(
        options.script,
        options.arguments,
        options.gpu,
        options.steps,
        options.snapshot,
        limit_minutes=options.limit_minutes,
        ranks=options.ranks,
        compile_eagerly=options.compile_eagerly,
        phases=options.phases,
        module=options.module,
    )
    # A traceback helps with the script's own errors. Any other ending is one line.
    if ran.status == FAILED and isinstance(ran.raised, Exception):
        print(traceback_of(ran), end="", file=sys.stderr)
    elif ran.error:
        place = f"{ran.line}: " if ran.line else ""
        print(f"memlab: {place}{ran.error}", file=sys.stderr)
    card = find_gpu(options.gpu)
    values = {"text": f"{_first_line(ran, card)}\n{ran}"}
    if options.json:
        fits = False if ran.ran_out else None
        values = ran.as_dict() | {"verdict": verdict_values(card, ran.verdict, fits)}
    return values | {"status": ran.status}


def _first_line(ran: Any, card: GPU) -> str:
    """The first line of the answer: whether the script fits the GPU, or why there is no verdict."""
    name = ran.script.name
    if ran.verdict:
        return verdict_line(name, card, ran.verdict)
    used = ran.footprint.device_used or ran.footprint.peak_reserved
    if card.total_memory is None:
        return f"{name}: no card is named (--gpu), up to {in_unit_of(used, used)} used by the run"
    size = in_unit_of(card.total_memory, card.total_memory)
    begin = f"{name} on {card.in_words}, which has {size}:"
    if ran.ran_out:
        return f"{begin} does not fit, {ran.ending()}"
    return f"{begin} no verdict, up to {in_unit_of(used, card.total_memory)} used until it ended"
