"""`memlab accuracy`: the predictions beside every record."""


def add_to(commands) -> None:
    """Add the command."""
    add = commands("accuracy", run, "set the predictions against every record")
    add("files", nargs="*", help="record files beside those of the package")
    add("--json", action="store_true", help="every row and the summary as JSON")


def run(options) -> dict:
    """Every record with what is predicted."""
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
