"""The `memlab` command, with one module per subcommand.

A subcommand's `add_to` adds its options. Its `run` returns a dictionary with the values for --json
or with `text` to print, and with a `status` if that is not 0.
"""

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
    """Run the command and return its exit status.

    - 0: done.
    - 1: runs of a grid failed, or `record --check` doubts a file.
    - 2: bad input, or an answer that could not be written.
    - 3: out of memory, no fit with the margin of `memlab.fits`, or a plan where nothing fits.
    - 130: Ctrl-C.

    `run` also returns the script's own status. It returns 1 for an exception of the script, or if
    the script puts nothing on the GPU, and 124 at the time limit.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    # The arguments of a script come after --, and argparse must not see them.
    has_script = argv[:1] == ["run"]
    cut = argv.index("--") if has_script and "--" in argv else len(argv)
    options, unknown = parser().parse_known_args(argv[:cut])
    if unknown:
        hint = "; arguments of the script go after --" * has_script
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
    """Print `text`. Returns 2 if standard output cannot take it, as on a full disk, else 0."""
    try:
        print(text, flush=True)
    except OSError as error:
        # Python flushes standard output once more at exit, and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # the reader of a pipe may stop early
            print(f"memlab: the answer could not be written: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def _skip_last_collection() -> None:
    """Skip the garbage collection at exit, which walks a million objects for about a second.

    With Triton imported it is not skipped, because Triton's bindings (nanobind) print a line for
    each of their objects that is left.
    """
    if "triton" not in sys.modules:
        gc.freeze()


def parser() -> argparse.ArgumentParser:
    """The parser of all subcommands and their options."""
    root = Parser(prog="memlab", description="Predict the GPU memory of training a transformer.")
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
        added = commands.add_parser(name, parents=parents, help=help)  # of class `Parser`, as root
        added.set_defaults(run=run)
        return added.add_argument

    for module in COMMANDS:
        module.add_to(command)
    return root
