"""The form around `plan`, worked by the messages that a notebook in a browser sends."""

import dataclasses
import html
import re

import pytest
from front_end import Live

from memlab import plan
from memlab.book.live import VIEW
from memlab.book.planner_form import Planner, picture
from memlab.cli import main

FORM = """
from memlab import plan
from memlab.book import Planner
asked = {"seq_len": 64, "effective_batch": 2, "ways": "full", "precisions": "fp32"}
form = Planner(plan("gpt2-tiny", "T4", **asked))
form
"""


@pytest.fixture(scope="module")
def answer():
    asked = {"seq_len": 64, "effective_batch": 2, "ways": "full", "precisions": "fp32"}
    return plan("gpt2-tiny", "T4", **asked)


@pytest.fixture(scope="module")
def live():
    live = Live(FORM)
    yield live
    live.close()


def command_of(live):
    return re.search(r"memlab plan [^<]*", live.shown())[0]


def test_the_form_shows_its_plan_and_a_still_picture_of_it(live, answer):
    assert VIEW in live.bundle
    for place in (live.bundle["text/html"], live.shown()):
        assert picture(answer) in place and html.escape(Planner(answer).command) in place
    still = live.bundle["text/html"]
    assert "still picture" in still and "<input" not in still and "<script" not in still


def test_what_is_left_without_a_kernel_says_so(live):
    """JupyterLab writes "model not found" into such an output."""
    assert "Run this cell again" in live.before["text/html"]


def test_segments_that_grow_stand_in_the_command(answer):
    grow = dataclasses.replace(answer.question, expandable_segments=True)
    assert "--expandable-segments" not in Planner(answer).command
    command = Planner(dataclasses.replace(answer, question=grow)).command
    assert "--expandable-segments --script" in command


@pytest.mark.slow
def test_what_is_chosen_is_planned(live, answer):
    live.choose("tokens", value=32)
    live.choose("card", label="P100")
    live.choose("LoRA", value=True)
    live.choose("cards", value=2)
    live.choose("link between them", label="pcie")
    live.press("Run")
    live.follow(lambda: "<progress>" in live.shown())
    live.follow(lambda: "--gpu P100" in live.shown())
    among = {"ranks": 2, "link": "pcie"}
    asked = dataclasses.replace(answer.question, seq_len=32, ways=("full", "lora"), **among)
    assert "--ranks 2 --link pcie" in live.shown() and "--script" not in live.shown()
    assert picture(plan(gpu="P100", **vars(asked))) in live.shown()
    assert picture(answer) not in live.shown()


def test_an_answer_in_sight_is_not_planned_again(live):
    live.follow(lambda: not live.find(description="Run")[1]["disabled"])
    live.press("Run")
    live.follow(lambda: "this run is shown below already" in live.shown())


@pytest.mark.parametrize(
    "control, wrong, right, said",
    [
        ("tokens", 0, 32, "seq_len is 0: allowed are whole numbers from 1"),
        ("cards", 3, 2, "effective_batch is 2: allowed are with ranks 3 multiples of it"),
        ("tokens", 10**6, 32, "seq_len is 1000000: gpt2-tiny allows whole numbers from 1 to"),
        ("model", "gpt-99", "gpt2-tiny", "gpt-99"),
    ],
)
def test_what_cannot_be_asked_is_said_in_one_line(live, control, wrong, right, said):
    live.follow(lambda: not live.find(description="Run")[1]["disabled"])
    before = command_of(live)
    live.choose(control, value=wrong)
    live.press("Run")
    live.follow(lambda: said in live.shown())
    line = live.shown().partition('role="alert">')[2].partition("</div>")[0]
    assert said in line and "\n" not in line
    assert command_of(live) == before  # with its answer
    live.choose(control, value=right)


def test_a_plan_can_be_stopped(live):
    live.follow(lambda: not live.find(description="Run")[1]["disabled"])
    before = command_of(live)
    live.choose("tokens", value=48)
    live.press("Run")
    live.follow(lambda: "<progress>" in live.shown())
    live.press("Stop")
    live.follow(lambda: ">stopped<" in live.shown())
    assert command_of(live) == before


def test_where_nothing_fits_the_form_says_what_would(answer):
    nothing = dataclasses.replace(
        answer, fastest=None, roomiest=None, remedies=("a & b",), decision=("c < d",)
    )
    said = picture(nothing)
    assert "Nothing fits" in said and "a &amp; b" in said and "c &lt; d" in said


def test_the_command_asks_the_same(capsys):
    narrow = {"ways": "full", "precisions": "fp32,fp16-amp"}
    answer = plan("gpt2-tiny", "T4", seq_len=64, effective_batch=2, **narrow)
    other = dataclasses.replace(answer.question, task="sequence-classification")
    other = Planner(dataclasses.replace(answer, question=other))
    assert " --task sequence-classification " in other.command
    *words, option, name = Planner(answer).command.split()
    assert (words[0], option, name) == ("memlab", "--script", "train.py")
    assert main(words[1:]) == 0
    assert capsys.readouterr().out.startswith(str(answer))


@pytest.mark.parametrize("gpu", [2**34])
def test_a_plan_without_names_is_refused(answer, gpu):
    with pytest.raises(ValueError, match="a model with a name on a card with a name"):
        Planner(dataclasses.replace(answer, card=plan("gpt2-tiny", gpu, ways="full").card))
