"""`memlab record`: the grid of recipes on this machine."""

import dataclasses

from memlab.cli.options import minutes
from memlab.evidence.records import FOLDER


def add_to(commands) -> None:
    """Add the command."""
    add = commands("record", run, "run the grid of recipes here and keep the records")
    add("--device", help="cuda or cpu, which runs tiny twins; CUDA where there is one")
    add("--out", default=FOLDER, help="folder for the file, one a device (the package's own)")
    add("--only", default="", metavar="WORDS", help="runs whose name has all of these words")
    add("--limit-minutes", type=minutes, default=float("inf"), help="for all runs together")
    add("--run-minutes", type=minutes, default=5.0, help="for one run")
    add("--steps", type=int, default=3, help="timed steps of a run")
    add("--list", action="store_true", help="the names of the runs, without running them")
    add("--json", action="store_true", help="what became of each run as JSON")


def run(options) -> dict:
    """What became of each run of the grid."""
    from memlab.evidence import grid, recording
    from memlab.predict.measure import pick_device

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
