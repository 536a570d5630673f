"""The ledger of claims comes from the chapters' text; a build ends where it would not be true."""

import dataclasses
import logging
from types import SimpleNamespace

import ledger
import pytest
from contents import ROOT
from docutils import nodes

from memlab.book.claims import SUBJECTS

FOUND = [
    decision
    for path in sorted((ROOT / "chapters").glob("*.ipynb"))
    for decision in ledger.decisions(path, f"chapters/{path.stem}")
]


def with_verdict(name, **changes):
    """The chapters' decisions, of which one is another."""
    return [
        dataclasses.replace(one, verdict=dataclasses.replace(one.verdict, **changes))
        if one.id == name
        else one
        for one in FOUND
    ]


@pytest.mark.parametrize(
    "found, left_open, says",
    [
        ([one for one in FOUND if one.id != "A3"], [], "A3 has no verdict (in no cell)"),
        (FOUND, ["A3"], "A3 is listed as open and is decided (05-freezing.ipynb, cell a3"),
        (FOUND, ["Z1"], "Z1 is listed as open and is no statement"),
        (with_verdict("B8", word="holds so"), [], "B8 has a verdict of another word ("),
        (FOUND + with_verdict("B8", word="open"), [], "B8 has verdicts that differ ("),
        (with_verdict("E5", says="other"), [], "E5 is cited in other words than those of claims"),
        (with_verdict("A1", id="Z1"), [], "Z1 is no statement ("),
        ([one for one in FOUND if one.id != "TensorRT"], [], "TensorRT has no cell that shows"),
    ],
)
def test_a_verdict_that_is_changed_or_removed_ends_the_build(found, left_open, says):
    assert ledger.problems(FOUND * 2, []) == []  # verdicts that agree are none
    assert ledger.problems(found, left_open)[0].startswith(says)


def test_a_problem_is_a_warning_which_the_build_takes_for_an_error(caplog):
    logging.getLogger("sphinx").propagate = True
    node, empty = ledger.ledger(open=[]), SimpleNamespace(found_docs=[])
    page = nodes.section("", node)
    ledger.write_ledger(SimpleNamespace(env=empty), page, "claims")
    assert len(caplog.messages) == len({one.id for one in FOUND})
    assert page.astext().count("no chapter decides it yet") > 0


def test_the_tables_lead_to_the_cells_and_hold_no_markup_of_a_source():
    whole = ledger.table(FOUND, lambda one: f"<a href={one.page}#{ledger.anchor(one)}>")
    named = ledger.named_table(FOUND, lambda one: one.place)
    for one in FOUND:
        assert one.place in named or f"#claim-{one.id.lower()}>" in whole
    assert ledger.table([], None).count("no chapter decides it yet") == whole.count("statement-")
    assert named.count('<tr id="named-') == len(SUBJECTS) and ".ipynb#" not in whole
    assert ledger.inline("`a` < 1 [here](02-b.ipynb#c)") == (
        '<code>a</code> &lt; 1 <a href="02-b.html#c">here</a>'
    )
