"""`memlab run`: a training script on a GPU that need not be there."""

import sys

from memlab.cli.options import GPU, card, count, minutes


def add_to(commands) -> None:
    """Add the command."""
    add = commands("run", run, "run a training script on a GPU that need not be there")
    add("script", help="a Python script, as it is; its own arguments come last, after --")
    add("--gpu", type=card, help=GPU)
    add("--steps", type=count, default=2, help="optimizer steps after which it ends")
    add("--ranks", type=count, default=1, help="started as torchrun would, as the first of so many")
    add("--limit-minutes", type=minutes, default=float("inf"), help="after which it is stopped")
    eager = "run what torch.compile would compile eagerly: an upper bound"
    add("--compile-eagerly", action="store_true", help=eager)
    add("--snapshot", metavar="FILE", help="for pytorch.org/memory_viz")
    add("--json", action="store_true", help="bytes as JSON")


def run(options) -> dict:
    """What became of the script."""
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
    )
    if ran.status == FAILED and isinstance(ran.raised, Exception):
        print(traceback_of(ran), end="", file=sys.stderr)
    elif ran.error:
        place = f"{ran.line}: " if ran.line else ""
        print(f"memlab: {place}{ran.error}", file=sys.stderr)
    values = ran.as_dict() if options.json else {"text": str(ran)}
    return values | {"status": ran.status}
