"""The panel of `explore`, worked by the messages that a notebook in a browser sends."""

import re

import pytest
from front_end import Live

from memlab import Recipe, explore, fits
from memlab.book.live import VIEW
from memlab.units import mib

TINY = Recipe("bert-large-tiny", batch_size=2, seq_len=64)
PANEL = """
from memlab import Recipe, explore
panel = explore(Recipe("bert-large-tiny", batch_size=2, seq_len=64),
                "batch_size", "checkpointing", "freeze", "lora_dropout", gpu="T4")
panel
"""


@pytest.fixture(scope="module")
def live():
    live = Live(PANEL)
    yield live
    live.close()


def test_the_panel_shows_its_recipe_and_a_still_picture_of_it(live):
    assert VIEW in live.bundle
    fit = fits(TINY, "T4")
    for place in (live.bundle["text/html"], live.shown()):
        assert str(fit) in place and "as given" in place
    still = live.bundle["text/html"]
    assert "still picture" in still and "<input" not in still and "<script" not in still
    assert "or reentrant, non-reentrant" in still


def test_what_is_chosen_is_simulated_and_its_code_gives_the_same(live):
    live.choose("batch size", label="16")
    live.choose("checkpointing", label="non-reentrant")
    live.choose("freeze", value="embeddings,1")
    live.press("Run")
    live.follow(lambda: "batch size 16" in live.shown())
    live.follow(lambda: not live.find(description="Run")[1]["disabled"])
    recipe = TINY.but(batch_size=16, checkpointing=True, freeze="embeddings,1")
    fit = fits(recipe, "T4")
    assert "checkpointing non-reentrant, freeze embeddings,1" in live.shown()
    assert mib(fit.footprint.peak_allocated) in live.shown() and "as given" in live.shown()
    code = re.search(r"<pre>(.*?)</pre>", live.shown())[1]
    assert "freeze=(&#x27;embeddings&#x27;, 1)" in code


def test_what_is_not_allowed_is_said_in_one_line_and_nothing_runs(live):
    before = live.shown().count('class="run"')
    live.choose("lora dropout", value=2.0)
    live.press("Run")
    live.follow(lambda: "alert" in live.shown())
    said = 'role="alert">lora_dropout is 2.0: allowed are numbers from 0 to below 1<'
    assert said in live.shown()
    assert live.shown().count('class="run"') == before
    live.choose("lora dropout", value=0.0)


def test_a_run_can_be_stopped_and_another_begun(live):
    before = live.shown().count('class="run"')
    live.choose("batch size", label="32")
    live.press("Run")
    live.follow(lambda: "<progress>" in live.shown())
    live.press("Stop")
    live.follow(lambda: ">stopped<" in live.shown())
    assert live.shown().count('class="run"') == before
    live.follow(lambda: not live.find(description="Run")[1]["disabled"])
    live.choose("card", label="RTX-4090")
    live.press("Run")
    live.follow(lambda: "</b> on RTX-4090" in live.shown())
    assert "batch size 32" in live.shown()


def test_a_run_that_is_in_sight_is_not_repeated(live):
    before = live.shown().count('class="run"')
    live.follow(lambda: not live.find(description="Run")[1]["disabled"])
    live.press("Run")
    live.follow(lambda: "this run is shown below already" in live.shown())
    assert live.shown().count('class="run"') == before


def test_every_field_of_a_recipe_has_a_control():
    import dataclasses

    names = [one.name for one in dataclasses.fields(Recipe)]
    panel = explore(TINY, *names)
    panel._build()
    assert set(panel._controls) == set(names)
    assert panel.chosen() == TINY


@pytest.mark.parametrize(
    "switches, gpu, said",
    [
        (["batches"], "T4", "a recipe has no field 'batches': allowed are model"),
        ([], "T5", "gpu is 'T5': allowed are"),
        ([], 2**30, "gpu is .*: allowed are"),
    ],
)
def test_a_wrong_field_or_card_is_refused(switches, gpu, said):
    with pytest.raises(ValueError, match=said):
        explore(TINY, *switches, gpu=gpu)
