"""The first page and the glossary: the order they advise, the labels, the words."""

import itertools
import re
from pathlib import Path

from notebook import Notebook

from memlab import find_gpu, find_records, formula
from memlab.book.chapters.cheatsheet import CHANGES
from memlab.planner.choice import ALIKE

CHAPTERS = Path(__file__).parents[2] / "chapters"
INDEX = (CHAPTERS / "index.md").read_text(encoding="utf-8")
GLOSSARY = (CHAPTERS / "glossary.md").read_text(encoding="utf-8")
# Chapter -> its row of the cheat sheet; chapter 14's is that of the technique left out.
ROWS = {"06": "precision", "07": "8-bit", "04": "accumulation", "08": "checkpointing"}


def test_the_order_of_trying_is_that_of_time():
    advice = INDEX.partition("slow a step least first (in brackets: minutes to read):")[
        2
    ].partition(";")[0]
    asked = re.findall(r"\]\((\d\d)-", advice)
    assert sorted(asked) == sorted([*ROWS, "14"])
    sheet = Notebook("cheatsheet").run("plain")
    card = find_gpu("RTX-4090").without_limit()
    for which, name in enumerate(("encoder", "decoder")):

        def took(row, which=which, name=name):
            recipe = sheet[name].but(**CHANGES[row][which])
            return formula(recipe, card).step_seconds.expected

        factors = {chapter: took(row) / took("plain") for chapter, row in ROWS.items()}
        order = [factors[chapter] for chapter in asked if chapter != "14"]
        # What differs by less than a ratio is off by may stand in either order.
        assert all(one <= (1 + ALIKE) * after for one, after in itertools.pairwise(order))
        assert took("eager") > took("plain") and asked[0] == "14"


def labels():
    table = INDEX.partition("| label |")[2].partition("\n\n")[0]
    return re.findall(r"^\| ([a-z ]+) \|", table, re.MULTILINE)


def test_the_labels_are_as_many_as_it_says_and_in_the_glossary():
    assert "one of five labels" in INDEX and len(labels()) == 5
    heads = re.findall(r"^(\S[^\n]*)$", GLOSSARY, re.MULTILINE)
    assert set(labels()) <= set(heads)


def test_the_first_page_says_how_many_cards_have_been_recorded():
    line = re.search(r"^\| recorded \|.*$", INDEX, re.MULTILINE)[0]
    said = re.search(r": (no|\d+) cards?\b", line)[1]
    cards = {run.device for run in find_records("recorded") if not run.device.startswith("CPU")}
    assert said == (str(len(cards)) if cards else "no")


def test_words_that_chapters_use_without_explaining_have_an_entry():
    words = "ZeRO FSDP DDP all-reduce GPTQ AWQ MXFP4 NVFP4 DoRA rsLoRA Muon GaLore".split()
    words += ["rank (process)", "mixture of experts", "grouped keys", "variable length (attention)"]
    missing = [word for word in words if not re.search(rf"^{re.escape(word)}$", GLOSSARY, re.M)]
    assert missing == []


def test_the_page_behind_launch_bound_has_the_word():
    entry = GLOSSARY.partition("\nlaunch-bound\n")[2].partition("\n\n")[0]
    (page,) = re.findall(r"\[\]\(([\w-]+)\.ipynb\)", entry)
    assert any("launch-bound" in cell.source for cell in Notebook(page).cells)
