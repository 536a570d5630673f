"""The `memlab` command: `memlab simulate` and `memlab measure`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys

import torch


def main(argv=None) -> int:
    """Run the command; returns the exit status: 0, 2 for bad input, 3 for out of memory."""
    options = _parser().parse_args(argv)
    try:
        result = options.run(options)
    except (ValueError, OSError) as error:
        print(f"memlab: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        print(f"memlab: {error}", file=sys.stderr)
        return 3
    print(json.dumps(result, indent=2) if options.json else result["text"])
    return 0


def _simulate(options) -> dict:
    from memlab.measure import versions
    from memlab.simulate import simulate

    recipe = _recipe(options)
    footprint = simulate(recipe, options.gpu)
    more = {"recipe": recipe.as_dict(), "gpu": options.gpu, "versions": versions()}
    return _result(options, recipe, footprint.as_dict() | more, footprint)


def _measure(options) -> dict:
    from memlab.measure import measure

    recipe = _recipe(options)
    measurement = measure(recipe, options.device, options.steps)
    return _result(
        options, recipe, measurement.as_dict() | {"recipe": recipe.as_dict()}, measurement
    )


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


def _parser() -> argparse.ArgumentParser:
    from memlab.recipe import ATTENTION, CHECKPOINTING, OPTIMIZERS, PRECISIONS, Recipe

    default = {field.name: field.default for field in dataclasses.fields(Recipe)}
    recipe = argparse.ArgumentParser(add_help=False)
    add = recipe.add_argument_group("recipe").add_argument
    add("--model", default=default["model"], help="a name, a path to a config.json or a hub name")
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
    recipe.add_argument("--json", action="store_true", help="bytes and seconds as JSON")

    parser = _Parser(prog="memlab", description="The GPU memory of training a transformer.")
    commands = parser.add_subparsers(required=True, metavar="simulate | measure")
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
    for command in (simulate, measure):
        command.error = parser.error
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return parser


if __name__ == "__main__":
    sys.exit(main())
