"""Predictions beside records in short: the summary of their errors, and the text of a report."""

from collections.abc import Iterable

import numpy as np

from memlab.evidence.accuracy import Comparison
from memlab.evidence.records import Record
from memlab.units import mib


def summary(comparisons: Iterable[Comparison]) -> list[dict]:
    """The errors of all, of each family and of each technique, by kind, predictor and figure.

    A list of dictionaries: against, predictor, figure, group, runs, refused, and of the errors'
    sizes median and p95, of the errors worst_over and worst_under (both 0 if there is none).
    """
    groups = {}
    for one in comparisons:
        if one.figure != "out of memory":
            for group in ("all", one.family, one.technique):
                key = one.against, one.predictor, one.figure, group
                groups.setdefault(key, []).append(one)
    rows = []
    for key, members in groups.items():
        row = dict(zip(("against", "predictor", "figure", "group"), key, strict=True))
        errors = [one.error for one in members if one.error is not None]
        row |= {"runs": len(members), "refused": len(members) - len(errors)}
        if errors:
            row["median"] = float(np.median(np.abs(errors)))
            row["p95"] = float(np.percentile(np.abs(errors), 95))
            row["worst_over"] = max(0.0, *errors)
            row["worst_under"] = min(0.0, *errors)
        rows.append(row)
    return rows


NO_GPU = (
    "No GPU has been recorded yet: the grid has run on a CPU only, as tiny twins. `memlab record` "
    "on a machine with a card makes the record."
)


def report(comparisons: list[Comparison], runs: Iterable[Record]) -> str:
    """The summary and the rows that miss, as text."""
    lines = []
    if not any(run.kind == "recorded" and not run.device.startswith("CPU") for run in runs):
        lines.append(NO_GPU)
    heading = None
    for row in summary(comparisons):
        if (row["against"], row["predictor"]) != heading:
            heading = row["against"], row["predictor"]
            lines.append(f"\n{row['predictor']}, against {row['against']}")
            lines.append(f"  {'':<28}runs  refused   median      p95  worst over  worst under")
        numbers = f"  {row['figure']:<12}{row['group']:<16}{row['runs']:>4}{row['refused']:>9}"
        if "median" in row:
            numbers += f"{row['median']:>9.3%}{row['p95']:>9.3%}"
            numbers += f"{row['worst_over']:>+12.3%}{row['worst_under']:>+13.3%}"
        lines.append(numbers)
    ran_out = [one for one in comparisons if one.figure == "out of memory"]
    if ran_out:
        right = sum(not one.missed for one in ran_out)
        lines.append(f"\nout of memory: {right} of {len(ran_out)} as recorded")
    for kind, timed in (("range", False), ("range of seconds", True)):
        ranges = [
            one.inside for one in comparisons if one.bounds and (one.figure == "seconds") == timed
        ]
        if ranges:
            inside = f"{sum(ranges)} of {len(ranges)} figures"
            lines.append(f"\ninside the reported {kind}: {inside}")
    missed = [one for one in comparisons if one.missed]
    lines.append(f"\n{len(missed)} figures miss what is allowed" + ":" * bool(missed))
    lines += [f"  {_miss(one)}" for one in missed]
    return "\n".join(lines).strip()


def _miss(one: Comparison) -> str:
    place = f"{one.against}, {one.name}, {one.predictor}: "
    if one.refused:
        return f"{place}refused: {one.refused}"
    if one.figure == "out of memory":
        ends = {True: "out of memory", False: "a fit"}
        return f"{place}{ends[one.predicted]} was predicted, {ends[one.recorded]} recorded"
    words = "{:.3f} s".format if one.figure == "seconds" else mib
    predicted, recorded = words(one.predicted), words(one.recorded)
    if one.bounds:
        predicted = " to ".join(map(words, one.bounds))
    return f"{place}{one.figure} {predicted} against {recorded}, {one.error:+.2%}"
