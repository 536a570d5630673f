"""The panel of `explore`, worked by the messages that a notebook in a browser sends."""

import dataclasses
import html
import re
import shlex

import pytest
from front_end import Live

from memlab import Recipe, cli, explore, fits, models
from memlab.book.live import VIEW
from memlab.spec.serving import Serving
from memlab.units import in_unit_of

TINY = Recipe("bert-large-tiny", batch_size=2, seq_len=64)
PANEL = """
from memlab import Recipe, explore
panel = explore(Recipe("bert-large-tiny", batch_size=2, seq_len=64),
                "batch_size", "checkpointing", "freeze", "lora_dropout", gpu="T4")
panel
"""


SERVING = Serving("gpt2-tiny", prompt=48, new_tokens=9)
SERVING_PANEL = """
from memlab import explore
from memlab.spec.serving import Serving
explore(Serving("gpt2-tiny", prompt=48, new_tokens=9),
        "weights", "cache", "prompt", "batch_size", gpu="T4")
"""


@pytest.fixture(scope="module")
def live():
    live = Live(PANEL)
    yield live
    live.close()


@pytest.fixture(scope="module")
def serving_live():
    live = Live(SERVING_PANEL)
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
    assert (
        in_unit_of(fit.footprint.peak_allocated, fit.total_memory) in live.shown()
        and "as given" in live.shown()
    )
    assert what_can_be_copied(live) == (recipe, fit)


def what_can_be_copied(live):
    """(what the command would be asked, what the Python says) of the lines that are shown."""
    blocks = re.findall(r"<pre>(.*?)</pre>", live.shown(), re.DOTALL)
    line, python = map(html.unescape, blocks)
    options = cli.parser().parse_args(shlex.split(line)[1:])
    names = {}
    lines, _, asked = python.rpartition("print")
    exec(lines, names)
    kind = Serving if "serving" in names else Recipe
    recipe = kind(**{one.name: getattr(options, one.name) for one in dataclasses.fields(kind)})
    fit = eval(asked, names)
    assert names[kind.__name__.lower()] == recipe and options.gpu in asked
    return recipe, fit


@pytest.mark.slow
def test_a_serving_is_shown_with_both_phases_and_a_still_picture_of_it(serving_live):
    fit = fits(SERVING, "T4")
    for place in (serving_live.bundle["text/html"], serving_live.shown()):
        assert str(fit) in place and "as given" in place
        for phase in ("prefill", "decode"):
            assert f"{phase}, estimated: {fit.footprint.times[phase]}" in place
        assert f"in {fit.footprint.peak_phase}" in place
    still = serving_live.bundle["text/html"]
    assert "or fp32, bf16, int8, nf4" in still and "<input" not in still


@pytest.mark.slow
def test_a_chosen_serving_is_simulated_and_its_line_and_python_give_the_same(serving_live):
    serving_live.choose("weights", label="fp32")
    serving_live.choose("cache", label="static")
    serving_live.choose("prompt", label="64")
    serving_live.choose("batch size", label="256")
    serving_live.press("Run")
    serving_live.follow(lambda: "<progress>" in serving_live.shown())
    serving_live.follow(lambda: "batch size 256" in serving_live.shown())
    serving_live.follow(lambda: not serving_live.find(description="Run")[1]["disabled"])
    serving = SERVING.but(weights="fp32", cache="static", prompt=64, batch_size=256)
    fit = fits(serving, "T4")
    assert in_unit_of(fit.footprint.peak_allocated, fit.total_memory) in serving_live.shown()
    assert (
        f"kv cache {in_unit_of(fit.footprint.breakdown['kv_cache'], fit.total_memory)}"
        in serving_live.shown()
    )
    assert what_can_be_copied(serving_live) == (serving, fit)


@pytest.mark.slow
def test_what_a_serving_does_not_allow_is_said_in_one_line(serving_live):
    before = serving_live.shown().count('class="run"')
    serving_live.choose("prompt", label=str(models.max_length("gpt2-tiny")))
    serving_live.press("Run")
    serving_live.follow(lambda: "alert" in serving_live.shown())
    assert 'role="alert">prompt and new_tokens are ' in serving_live.shown()
    assert serving_live.shown().count('class="run"') == before


def test_only_models_that_write_text_are_offered_for_serving():
    offered = []
    for recipe in (Serving("gpt2"), Recipe("gpt2")):
        panel = explore(recipe, "model")
        panel._build()
        offered.append([name for name, _ in panel._controls["model"].options])
    assert {"llama-2-7b", "t5-3b"} <= set(offered[0]) < set(offered[1])
    assert "bert-large" in set(offered[1]) - set(offered[0])


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


def test_a_switch_that_is_on_or_off_is_shown_so():
    for value, word in ((True, "on"), (False, "off")):
        panel = explore(dataclasses.replace(TINY, set_to_none=value), "set_to_none", gpu="T4")
        panel.runs = [panel.work(panel.recipe, panel.card)]
        page = panel.still()
        assert f"<td>set to none</td><td><b>{word}</b></td>" in page


@pytest.mark.parametrize("recipe", [TINY, SERVING])
def test_every_field_has_a_control(recipe):
    names = [one.name for one in dataclasses.fields(recipe)]
    panel = explore(recipe, *names)
    panel._build()
    assert set(panel._controls) == set(names)
    assert panel.chosen() == recipe


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
    with pytest.raises(ValueError, match=said.replace("recipe", "serving")):
        explore(SERVING, *switches, gpu=gpu)
