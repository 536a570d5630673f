"""The nine BERT-large runs on a V100 that one guide printed, next to their simulations."""

import pandas as pd
from pandas.io.formats.style import Styler

from memlab.book import show
from memlab.book.lessons import estimated_run
from memlab.evidence.records import find_records
from memlab.predict.simulate import simulate
from memlab.spec.recipe import Recipe
from memlab.units import MiB

SEQUENCES = 512  # sequences that each run trained on


def guide_runs(*names: str) -> pd.DataFrame:
    """The guide's printed runs of these names, each simulated with today's kernels.

    One row per run, with these columns:

    - simulated, published: bytes in use on the device. The simulation adds the context that the
      guide measured.
    - ratio: simulated / published.
    - s, samples/s: the printed seconds and rate; consistent: whether the two agree.
    - footprint: the simulated `Footprint`; rate: its estimated samples per second.
    - low, high: the estimated seconds of the whole run.
    - said, in time: the result of `estimated_run`.

    Raises KeyError for a name that the guide does not have.
    """
    printed = {run.name: run for run in find_records("published")}
    rows = {}
    for name in names:
        figures, asked = printed[name].figures, Recipe(**printed[name].recipe)
        footprint, samples = simulate(asked, "V100"), asked.batch_size * asked.accumulation
        memory = footprint.peak_reserved + figures["context_bytes"]
        used, time = figures["device_used_bytes"], footprint.step_seconds
        took, rate = figures["run_seconds"], figures["samples_per_second"]
        rows[name] = {"simulated": memory, "published": used, "ratio": memory / used}
        rows[name] |= {"s": took, "samples/s": rate}
        rows[name] |= {"consistent": abs(SEQUENCES / took - rate) < 0.02}
        rows[name] |= {"footprint": footprint, "rate": footprint.samples_per_second}
        ends = {"low": time.low, "high": time.high}
        rows[name] |= {end: SEQUENCES / samples * each for end, each in ends.items()}
        rows[name] |= zip(("said", "in time"), estimated_run(printed[name], footprint), strict=True)
    return pd.DataFrame.from_dict(rows, orient="index")


def guide_table(runs: pd.DataFrame) -> Styler:
    """The result of `guide_runs` as a table: device memory in MiB, and seconds of the run."""
    shown = runs[["simulated", "published"]] / MiB
    shown["error"] = runs["ratio"] - 1
    shown["published s"] = runs["s"]
    ends = zip(runs["low"], runs["high"], strict=True)
    shown["estimated s"] = [show.between(*pair) for pair in ends]
    shown.index = [name.replace("accumulation", "acc.") for name in shown.index]
    shown.index = [name.replace("checkpointing", "ckpt.") for name in shown.index]
    return show.table(shown, "V100: device memory in MiB, seconds for 512 sequences")
