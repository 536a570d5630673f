"""What a curious reader changes first in a chapter does not stop it: `edits.yml` has three each."""

import pytest
import try_edit
import yaml
from contents import ROOT

EDITS = yaml.safe_load((ROOT / "tests" / "edits.yml").read_text(encoding="utf-8"))
CHAPTERS = sorted(p.stem for p in (ROOT / "chapters").glob("[0-9][0-9]-*.ipynb"))
NUMBERED = [stem for stem in CHAPTERS if not stem.endswith("-deeper")]


@pytest.mark.parametrize("chapter", NUMBERED)
def test_a_chapter_names_three_edits_of_which_one_does_not_fit(chapter):
    pages = chapter, f"{chapter}-deeper"
    edits = [(page, edit) for page in pages for edit in EDITS.get(page, ())]
    assert len(edits) >= 3 and any(edit.get("too_large") for _, edit in edits)
    for page, edit in edits:
        try_edit.edited(page, edit["cell"], edit["old"], edit["new"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "chapter, edit",
    [(chapter, one) for chapter, edits in EDITS.items() for one in edits],
    ids=lambda value: value if isinstance(value, str) else f"{value['old']}->{value['new']}",
)
def test_the_page_goes_on_after_an_edit(chapter, edit):
    notebook = try_edit.edited(chapter, edit["cell"], edit["old"], edit["new"])
    assert try_edit.failures(notebook) == []
