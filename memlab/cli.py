"""The `memlab` command: plan, simulate, serve, run, measure, record, accuracy."""

import argparse
import atexit
import dataclasses
import gc
import json
import logging
import sys
from pathlib import Path

from memlab.evidence.records import FOLDER
from memlab.fields import described
from memlab.gpus import find_gpu
from memlab.recipe import Recipe
from memlab.serving import Serving

LINK = "between ranks: nvlink, pcie, infiniband-400, ethernet-100, ethernet-10"


def main(argv=None) -> int:
    """Run the command; returns the exit status.

    0, 1 if runs of a grid failed, 2 for bad input, 3 for out of memory and for a plan where nothing
    fits, 130 for Ctrl-C. Of `run` also the script's own, 1 for its exception and for a script that
    made no optimizer step, and 124 at the time limit.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    cut = argv.index("--") if argv[:1] == ["run"] and "--" in argv else len(argv)
    options = _parser().parse_args(argv[:cut])
    options.arguments = argv[cut + 1 :]  # a script's own
    logging.getLogger("transformers").setLevel(logging.ERROR)
    # The last collection goes through a million objects, for a second, before all of them end.
    atexit.register(gc.freeze)
    try:
        result = options.run(options)
    except (ValueError, OSError) as error:
        print(f"memlab: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        import torch  # loaded with the command, and not for a question for help

        if not isinstance(error, torch.OutOfMemoryError):
            raise
        print(f"memlab: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt as interrupt:
        print(f"memlab: interrupted; {interrupt or 'nothing was written'}", file=sys.stderr)
        return 130
    print(json.dumps(result, indent=2) if options.json else result["text"])
    return result.get("status", 1 if result.get("failed") else 0)


def _plan(options) -> dict:
    from memlab.choosing import plan

    fields = ("seq_len", "effective_batch", "ways", "precisions", "keep_quality", "lora_rank")
    asked = {name: getattr(options, name) for name in (*fields, "task", "ranks", "link")}
    if options.margin is not None:
        asked["margin"] = options.margin
    if options.script:
        if len(options.gpu) != 1 or options.ranks > 1:
            raise ValueError("a script is for one card: name it with --gpu, without --ranks")
        if Path(options.script).exists() and not options.force:
            raise ValueError(f"{options.script} is there already: --force writes over it")
    (cards,) = options.gpu if len(options.gpu) == 1 else (options.gpu or None,)
    answer = plan(options.model, cards, **asked)
    text, written = str(answer), options.script if answer else None
    if written:
        text = f"{text}\n{_write_script(answer.fastest.recipe, options)}"
    values = answer.as_dict() | {"script": written} if options.json else {"text": text}
    return values | {"status": 0 if answer else 3}


def _write_script(recipe, options) -> str:
    from memlab.scripts import pip_line, training_script

    text = training_script(recipe, options.api)
    with open(options.script, "w" if options.force else "x", encoding="utf-8") as file:
        file.write(text)
    return f"The fastest is written to {options.script}; it needs: {pip_line(recipe, options.api)}"


def _simulate(options) -> dict:
    return _simulated(_recipe(options), options, options.link)


def _serve(options) -> dict:
    return _simulated(_recipe(options, Serving), options)


def _simulated(recipe, options, link=None) -> dict:
    from memlab.measuring import versions
    from memlab.simulation import simulate

    found = None
    if options.largest:
        from memlab.planning import largest

        found = largest(recipe, options.gpu, options.largest.replace("-", "_"))
        recipe = found.recipe
        if not found.value:
            values = {"largest": found.as_dict()} if options.json else {"text": str(found)}
            return values | {"status": 3}
    footprint = simulate(recipe, options.gpu, link)
    more = {
        type(recipe).__name__.lower(): recipe.as_dict(),
        "gpu": options.gpu,
        "versions": versions(),
    }
    more |= {"largest": found.as_dict()} if found else {}
    shown = f"{found}\n{footprint}" if found else footprint
    return _result(options, recipe, footprint.as_dict() | more, shown)


def _run(options) -> dict:
    from memlab.running import FAILED, traceback_of, try_script

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


def _measure(options) -> dict:
    from memlab.measuring import measure

    recipe = _recipe(options)
    measurement = measure(recipe, options.device, options.steps)
    return _result(
        options, recipe, measurement.as_dict() | {"recipe": recipe.as_dict()}, measurement
    )


def _record(options) -> dict:
    from memlab.evidence import grid, recording
    from memlab.measuring import pick_device

    device = pick_device(options.device)
    runs = grid.select(grid.grid_runs(tiny=device.type == "cpu"), options.only)
    if options.list:
        recipes = {name: recipe.as_dict() for name, recipe in runs.items()}
        return {"runs": recipes, "text": "\n".join(runs)}
    limits = options.limit_minutes * 60, options.run_minutes * 60
    try:
        report = recording.record(device, options.out, runs, *limits, options.steps)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("what was finished is kept; start again to go on") from None
    return dataclasses.asdict(report) | {"path": str(report.path), "text": str(report)}


def _accuracy(options) -> dict:
    from memlab.evidence.accuracy import compare_records
    from memlab.evidence.records import find_records, load
    from memlab.evidence.report import report, summary

    runs = find_records() + [run for path in options.files for run in load(path)]
    compared = compare_records(runs)
    return {
        "rows": [one.as_dict() for one in compared],
        "summary": summary(compared),
        "text": report(compared, runs),
    }


def _result(options, recipe, values, shown) -> dict:
    return values if options.json else {"text": f"{recipe}\n{shown}"}


def _recipe(options, kind=Recipe):
    fields = [field.name for field in dataclasses.fields(kind)]
    return kind(**{name: getattr(options, name) for name in fields})


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line instead of the whole usage."""
        self.exit(2, f"memlab: {message}\n")


def _card(text: str) -> str | int:
    """A card's name, which may be a number (4090), or so many bytes."""
    try:
        find_gpu(text)
    except ValueError:
        return int(text) if text.lstrip("-").isdigit() else text
    return text


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not minutes > 0:
        raise argparse.ArgumentTypeError(f"it is {text!r}: allowed are numbers above 0")
    return minutes


def _options_of(kind) -> argparse.ArgumentParser:
    """The options of a `Recipe` or a `Serving`, made from its fields."""
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group(kind.__name__.lower())
    for field in dataclasses.fields(kind):
        if field.name == "model":
            _add_model(group, field)
        else:
            _add_field(group, field)
    parser.add_argument("--json", action="store_true", help="bytes and seconds as JSON")
    return parser


def _add_model(group, field) -> None:
    which = group.add_mutually_exclusive_group()
    which.add_argument("--model", default=field.default, help=field.metadata["help"])
    which.add_argument("--config", dest="model", metavar="PATH", help="a config.json")


def _add_plan(add) -> None:
    """The options of a question."""
    told = {field.name: field for field in dataclasses.fields(Recipe)}
    add("--model", "--config", required=True, help=told["model"].metadata["help"])
    cards = "a card's name or a number of bytes; several, or none for all, ask which card to take"
    add("--gpu", type=_card, nargs="+", default=[], help=cards)
    add("--seq-len", type=int, default=512, help=told["seq_len"].metadata["help"])
    add("--effective-batch", type=int, default=16, help="sequences of one optimizer step")
    add("--ways", default="full,lora,qlora", help="what may be tried, what you would try first")
    add("--precisions", help="what may be taken, with commas; else what the card is made for")
    quality = "also what may train worse: pure half precision, SGD"
    add("--any-quality", dest="keep_quality", action="store_false", help=quality)
    add("--lora-rank", type=int, default=16, help=told["lora_rank"].metadata["help"])
    add("--task", help=told["task"].metadata["help"])
    add("--ranks", type=int, default=1, help="cards of that kind that train together")
    add("--link", help=LINK)
    add("--margin", type=float, help="share of what is predicted to keep free; 0.05 if none is")
    add("--script", metavar="FILE", help="writes a training script of the fastest")
    add("--api", default="trainer", help="of the script: trainer or accelerate")
    add("--force", action="store_true", help="writes the script over a file that is there")
    add("--json", action="store_true", help="the plan as JSON")


def _add_field(group, field) -> None:
    said, default = field.metadata, field.default
    name, text = field.name, described(said)
    if default is True:
        name, text = said["off"]
    option = f"--{name.replace('_', '-')}"
    if isinstance(default, bool):
        action = "store_false" if default else "store_true"
        group.add_argument(option, dest=field.name, action=action, help=text)
    elif said["bare"]:
        group.add_argument(option, nargs="?", const=said["bare"], default=default, help=text)
    else:
        kind = type(default) if isinstance(default, (int, float)) else str
        group.add_argument(option, type=kind, default=default, help=text)


def _parser() -> argparse.ArgumentParser:
    recipe, serving = _options_of(Recipe), _options_of(Serving)
    parser = _Parser(prog="memlab", description="The GPU memory of training a transformer.")
    commands = parser.add_subparsers(
        required=True, metavar="plan | simulate | serve | run | measure | record | accuracy"
    )

    def command(name, run, help, parents=()):
        added = commands.add_parser(name, parents=parents, help=help)
        added.set_defaults(run=run)
        added.error = parser.error
        return added.add_argument

    add = command("plan", _plan, "how to train a model on a card, or which card to take")
    _add_plan(add)
    add = command("simulate", _simulate, "predict a step on a GPU that need not be there", [recipe])
    add("--gpu", type=_card, help="a card's name or a number of bytes; none means no limit")
    add("--link", help=LINK)
    sizes = ("batch-size", "seq-len")
    add("--largest", choices=sizes, help="with the largest one that fits the card, as plan has it")
    add = command("serve", _serve, "predict inference: prefill and decode", [serving])
    add("--gpu", type=_card, help="a card's name or a number of bytes; none means no limit")
    sizes = ("batch-size", "prompt")
    add("--largest", choices=sizes, help="with the largest one that fits the card")
    add = command("run", _run, "run a training script on a GPU that need not be there")
    add("script", help="a Python script, as it is; its own arguments come last, after --")
    add("--gpu", type=_card, help="a card's name or a number of bytes; none means no limit")
    add("--steps", type=int, default=2, help="optimizer steps after which it ends")
    add("--ranks", type=int, default=1, help="started as torchrun would, as the first of so many")
    add("--limit-minutes", type=_minutes, default=float("inf"), help="after which it is stopped")
    eager = "run what torch.compile would compile eagerly: an upper bound"
    add("--compile-eagerly", action="store_true", help=eager)
    add("--snapshot", metavar="FILE", help="for pytorch.org/memory_viz")
    add("--json", action="store_true", help="bytes as JSON")
    add = command("measure", _measure, "measure a step on this machine", [recipe])
    add("--device", help="cuda or cpu; CUDA where there is one")
    add("--steps", type=int, default=5, help="timed steps")
    add = command("record", _record, "run the grid of recipes here and keep the records")
    add("--device", help="cuda or cpu, which runs tiny twins; CUDA where there is one")
    add("--out", default=FOLDER, help="folder for the file, one a device (the package's own)")
    add("--only", default="", metavar="WORDS", help="runs whose name has all of these words")
    add("--limit-minutes", type=_minutes, default=float("inf"), help="for all runs together")
    add("--run-minutes", type=_minutes, default=5.0, help="for one run")
    add("--steps", type=int, default=3, help="timed steps of a run")
    add("--list", action="store_true", help="the names of the runs, without running them")
    add("--json", action="store_true", help="what became of each run as JSON")
    add = command("accuracy", _accuracy, "set the predictions against every record")
    add("files", nargs="*", help="record files beside those of the package")
    add("--json", action="store_true", help="every row and the summary as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
