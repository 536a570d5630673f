"""The `memlab` command: simulate, measure, record, accuracy."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys

import torch


def main(argv=None) -> int:
    """Run the command; returns the exit status.

    0, 1 if runs of a grid failed, 2 for bad input, 3 for out of memory, 130 for Ctrl-C.
    """
    options = _parser().parse_args(argv)
    try:
        result = options.run(options)
    except (ValueError, OSError) as error:
        print(f"memlab: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        print(f"memlab: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt as interrupt:
        print(f"memlab: interrupted; {interrupt or 'nothing was written'}", file=sys.stderr)
        return 130
    print(json.dumps(result, indent=2) if options.json else result["text"])
    return 1 if result.get("failed") else 0


def _simulate(options) -> dict:
    from memlab.measuring import versions
    from memlab.simulation import simulate

    recipe = _recipe(options)
    footprint = simulate(recipe, options.gpu)
    more = {"recipe": recipe.as_dict(), "gpu": options.gpu, "versions": versions()}
    return _result(options, recipe, footprint.as_dict() | more, footprint)


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


def _recipe(options):
    from memlab.recipe import Recipe

    fields = [field.name for field in dataclasses.fields(Recipe)]
    return Recipe(**{name: getattr(options, name) for name in fields})


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line instead of the whole usage."""
        self.exit(2, f"memlab: {message}\n")


def _card(text: str) -> str | int:
    return int(text) if text.lstrip("-").isdigit() else text


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not minutes > 0:
        raise argparse.ArgumentTypeError(f"it is {text!r}: allowed are numbers above 0")
    return minutes


def _parser() -> argparse.ArgumentParser:
    from memlab.evidence.records import FOLDER
    from memlab.recipe import ATTENTION, BASES, CHECKPOINTING, OPTIMIZERS, PRECISIONS, Recipe

    default = {field.name: field.default for field in dataclasses.fields(Recipe)}
    recipe = argparse.ArgumentParser(add_help=False)
    add_group = recipe.add_argument_group("recipe")
    add = add_group.add_argument
    which = add_group.add_mutually_exclusive_group()
    which.add_argument("--model", default=default["model"], help="a name, a path or a hub name")
    which.add_argument("--config", dest="model", metavar="PATH", help="a config.json")
    add("--task", help="sequence-classification, causal-lm or masked-lm")
    for name, text in (
        ("batch-size", "sequences of one micro-batch"),
        ("seq-len", "tokens of a sequence"),
        ("accumulation", "micro-batches of one optimizer step"),
    ):
        add(f"--{name}", type=int, default=default[name.replace("-", "_")], help=text)
    for name, allowed in (
        ("precision", PRECISIONS),
        ("optimizer", OPTIMIZERS),
        ("attention", ATTENTION),
    ):
        add(f"--{name}", default=default[name], help=", ".join(allowed))
    add(
        "--checkpointing",
        nargs="?",
        const="non-reentrant",
        default="none",
        help=f"{', '.join(CHECKPOINTING)}; alone it means non-reentrant",
    )
    add(
        "--keep-gradients",
        dest="set_to_none",
        action="store_false",
        help="zero_grad(set_to_none=False): gradients are zeroed, not freed",
    )
    add("--padded", action="store_true", help="batches carry an attention mask")
    add("--freeze", default="", help="embeddings, a number of layers, backbone or module names")
    add("--lora-rank", type=int, default=0, help="rank of LoRA adapters; 0 for none")
    add("--lora-targets", default=default["lora_targets"], help="all-linear, or module names")
    add("--lora-dropout", type=float, default=0.0, help="dropout on the adapters' input")
    add(
        "--lora-half",
        dest="lora_fp32",
        action="store_false",
        help="adapters in the model's dtype instead of fp32",
    )
    add("--base", default="none", help=f"{', '.join(BASES)}: the frozen weights under LoRA")
    add("--block-size", type=int, default=64, help="weights that share a scale, for 4 bits")
    add("--double-quant", action="store_true", help="those scales in 8 bits")
    add("--compute-dtype", help="fp32, fp16 or bf16, of a base's products")
    add(
        "--no-upcast",
        dest="upcast",
        action="store_false",
        help="what is not quantized stays in the compute dtype instead of fp32",
    )
    recipe.add_argument("--json", action="store_true", help="bytes and seconds as JSON")

    parser = _Parser(prog="memlab", description="The GPU memory of training a transformer.")
    commands = parser.add_subparsers(
        required=True, metavar="simulate | measure | record | accuracy"
    )
    simulate = commands.add_parser(
        "simulate", parents=[recipe], help="predict a step on a GPU that need not be there"
    )
    simulate.add_argument(
        "--gpu", type=_card, help="a card's name or a number of bytes; none means no limit"
    )
    simulate.set_defaults(run=_simulate)
    measure = commands.add_parser(
        "measure", parents=[recipe], help="measure a step on this machine"
    )
    measure.add_argument("--device", help="cuda or cpu; CUDA where there is one")
    measure.add_argument("--steps", type=int, default=5, help="timed steps")
    measure.set_defaults(run=_measure)
    record = commands.add_parser("record", help="run the grid of recipes here and keep the records")
    add = record.add_argument
    add("--device", help="cuda or cpu, which runs tiny twins; CUDA where there is one")
    add("--out", default=FOLDER, help="folder for the file, one a device (the package's own)")
    add("--only", default="", metavar="WORDS", help="runs whose name has all of these words")
    add("--limit-minutes", type=_minutes, default=float("inf"), help="for all runs together")
    add("--run-minutes", type=_minutes, default=5.0, help="for one run")
    add("--steps", type=int, default=3, help="timed steps of a run")
    add("--list", action="store_true", help="the names of the runs, without running them")
    add("--json", action="store_true", help="what became of each run as JSON")
    record.set_defaults(run=_record)
    accuracy = commands.add_parser("accuracy", help="set the predictions against every record")
    accuracy.add_argument("files", nargs="*", help="record files beside those of the package")
    accuracy.add_argument("--json", action="store_true", help="every row and the summary as JSON")
    accuracy.set_defaults(run=_accuracy)
    for command in (simulate, measure, record, accuracy):
        command.error = parser.error
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return parser


if __name__ == "__main__":
    sys.exit(main())
