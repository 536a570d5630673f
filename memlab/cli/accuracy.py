"""`memlab accuracy`: the predictions beside records."""

import sys


def add_to(commands) -> None:
    """Add the command."""
    add = commands("accuracy", run, "set the predictions against every record")
    files = "record files; those of the package if none is named, which takes most of an hour"
    add("files", nargs="*", help=files)
    add("--json", action="store_true", help="every row and the summary as JSON")


def run(options) -> dict:
    """Every record with what is predicted."""
    from memlab.evidence.accuracy import compare_records
    from memlab.evidence.accuracy_text import report, summary
    from memlab.evidence.records import find_records, load

    named = [run for path in options.files for run in load(path)]
    runs = named if options.files else find_records()
    if not options.files:
        print(
            f"memlab: predicting all {len(runs)} runs anew takes most of an hour; name record "
            "files for those alone",
            file=sys.stderr,
        )
    compared = compare_records(runs)
    return {
        "rows": [one.as_dict() for one in compared],
        "summary": summary(compared),
        "text": report(compared, runs),
    }
