"""The `memlab` command, a module for each of its verbs."""

import argparse
import atexit
import gc
import importlib.metadata
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from memlab.cli import measure, plan, record, report, run, serve, simulate
from memlab.cli.options import Parser
from memlab.cli.verdict import is_out_of_memory
from memlab.libraries import first_line

COMMANDS = (plan, simulate, serve, run, measure, record, report)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status.

    0, 1 if runs of a grid failed, 2 for bad input, 3 for out of memory, for what does not fit with
    the margin of `memlab.fits`, and for a plan where nothing fits, 130 for Ctrl-C. Of `run` also
    the script's own, 1 for its exception and for a script that puts nothing on the card, and 124 at
    the time limit.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    has_script = argv[:1] == ["run"]
    cut = argv.index("--") if has_script and "--" in argv else len(argv)
    options, unknown = parser().parse_known_args(argv[:cut])
    if unknown:
        hint = "; those of the script come after --" * has_script
        parser().error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    options.arguments = argv[cut + 1 :]  # a script's own
    logging.getLogger("transformers").setLevel(logging.ERROR)
    atexit.register(_skip_last_collection)
    try:
        result = options.run(options)
    except (ValueError, OSError) as error:
        print(f"memlab: {first_line(error)}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        print(f"memlab: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt as interrupt:
        print(f"memlab: interrupted; {str(interrupt) or 'nothing was written'}", file=sys.stderr)
        return 130
    status = result.get("status", 1 if result.get("failed") else 0)
    text = result.pop("text", "")
    return _shown(json.dumps(result, indent=2) if options.json else text) or status


def _shown(text: str) -> int:
    """Print; 2 where standard output takes no more (a full disk), 0 elsewhere."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at its end
        if not isinstance(error, BrokenPipeError):  # whoever reads has had enough
            print(f"memlab: the answer could not be written: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def _skip_last_collection() -> None:
    """The last collection goes through a million objects, for a second, before all of them end.

    Triton wants it: its bindings (nanobind) print a line for each of theirs that is left.
    """
    if "triton" not in sys.modules:
        gc.freeze()


def parser() -> argparse.ArgumentParser:
    """All commands with their options."""
    root = Parser(prog="memlab", description="The GPU memory of training a transformer.")
    version = f"memlab {importlib.metadata.version('gpu-memory-lab')}"
    root.add_argument("--version", action="version", version=version)
    names = " | ".join(module.__name__.rpartition(".")[2] for module in COMMANDS)
    commands = root.add_subparsers(required=True, metavar=names)

    def command(
        name: str,
        run: Callable[[argparse.Namespace], dict[str, Any]],
        help: str,
        parents: Sequence[Parser] = (),
    ) -> Callable[..., argparse.Action]:
        added = commands.add_parser(name, parents=parents, help=help)  # a `Parser`, as the whole
        added.set_defaults(run=run)
        return added.add_argument

    for module in COMMANDS:
        module.add_to(command)
    return root
