"""`memlab record`: measure the grid of recipes on this machine, or check a file of records."""

import dataclasses
from argparse import Namespace

from memlab.cli.options import Commands, count, minutes
from memlab.evidence.records import FOLDER


def add_to(commands: Commands) -> None:
    """Add the command."""
    add = commands(
        "record", run, "measure the grid of recipes on this machine and keep the records"
    )
    add("--device", help="cuda, or cpu for tiny twins; by default cuda if there is one")
    add(
        "--out",
        default=FOLDER,
        help="folder for the records, one file per device; by default the package's own",
    )
    add("--only", default="", metavar="WORDS", help="only runs whose names have all of these words")
    add("--limit-minutes", type=minutes, default=float("inf"), help="limit for all runs")
    add("--run-minutes", type=minutes, default=5.0, help="limit for one run")
    add("--steps", type=count, default=3, help="number of timed steps per run")
    add(
        "--note",
        default="",
        help="a remark on the machine, such as: Colab, free, nothing else running",
    )
    check = "check whether a GPU's records can be right, without running"
    add("--check", metavar="FILE", help=check)
    add("--list", action="store_true", help="print the names of the runs, without running them")
    add("--json", action="store_true", help="print the outcome of each run as JSON")


def run(options: Namespace) -> dict:
    """Run the grid and report on each run; with --check, report what is doubtful about a file."""
    if options.check:
        return _checked(options.check)
    from memlab.evidence import grid, recording
    from memlab.predict.measure import pick_device

    device = pick_device(options.device)
    runs = grid.select(grid.grid_runs(tiny=device.type == "cpu"), options.only)
    if options.list:
        recipes = {name: recipe.as_dict() for name, recipe in runs.items()}
        return {"runs": recipes, "text": "\n".join(runs)}
    limits = options.limit_minutes * 60, options.run_minutes * 60
    try:
        report = recording.record(device, options.out, runs, *limits, options.steps, options.note)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("finished runs are kept; start again to continue") from None
    return dataclasses.asdict(report) | {"path": str(report.path), "text": str(report)}


def _checked(path: str) -> dict:
    """The doubts about a file's records; status 1 if there are any.

    Raises ValueError for records of a CPU.
    """
    from memlab.evidence.plausibility import against_prediction, doubts
    from memlab.evidence.records import load

    runs = load(path)
    if all(run.device.startswith("CPU") for run in runs):
        raise ValueError(f"{path} has records of a CPU: only those of a GPU can be checked")
    problems = [f"{run.name}: {doubt}" for run in runs for doubt in doubts(run)]
    # A simulation takes seconds per run: only for records whose figures agree with each other.
    problems = problems or against_prediction(runs)
    text = "\n".join(problems) or f"{len(runs)} record{'s' * (len(runs) > 1)}, nothing doubtful"
    return {"doubts": problems, "text": text, "status": 1 if problems else 0}
