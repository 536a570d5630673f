"""What frozen layers keep: the panel's sums are the full model's simulation, and the page's."""

import random

import pytest

from memlab import Recipe, simulate
from memlab.book.chapters.freezing import FreezingPanel, Part, totals

pytestmark = pytest.mark.slow  # a browser beside Python: left to make nightly

BERT = Recipe("bert-large", batch_size=8, seq_len=512)
FEW = [Part("embeddings", 5, 5, 10, 3, 0), Part("layer 1", 7, 7, 14, 9, 4)]
FEW += [Part("head", 1, 1, 2, 2, 1)]


@pytest.fixture(scope="module")
def panel():
    return FreezingPanel()


@pytest.fixture(scope="module")
def page(open_once, panel):
    return open_once(panel, FreezingPanel(FEW))


def simulated(freeze):
    """The same sums of the model at full depth."""
    line = simulate(BERT.but(freeze=freeze)).timeline
    begin = line.phases.index("backward") - 1
    end = len(line.phases) - 1 - line.phases[::-1].index("backward")
    found = {
        "parameters": line.levels["parameters"][begin],
        "activations": line.levels["activations"][begin],
        "gradients": line.levels["gradients"][end],
        "states": line.levels["optimizer_states"][end],
    }
    held = found["parameters"] + found["states"]
    return found | {"before": held + found["activations"], "after": held + found["gradients"]}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", [0, 13, 25])
def test_from_below_it_is_the_whole_model_simulated(panel, page, first):
    page.at = 0
    frozen = [part.name for part in panel.parts[:first]]
    found = panel.totals(frozen)
    assert found == simulated(("embeddings", first - 1) if first else ())
    page.set("first", first)
    assert page.figures() == found


def test_frozen_layers_between_are_the_whole_model_simulated(panel, page):
    page.at = 0
    layers = (0, 1, 5, 23)
    page.set("first", 0)
    for layer in layers:
        page.click(f"[data-name='layer {layer + 1}']")
    found = panel.totals([f"layer {layer + 1}" for layer in layers])
    assert page.figures() == found == simulated(tuple(f"encoder.layer.{n}" for n in layers))
    assert "down to embeddings" in page.text(".say")


def test_the_buttons_give_what_python_gives(panel, page):
    page.at = 0
    page.set("first", 0)
    draw, frozen = random.Random(1), set()
    for part in draw.choices(panel.parts, k=30):
        page.click(f"[data-name='{part.name}']")
        frozen ^= {part.name}
        assert page.figures() == panel.totals(frozen)
    page.click(".swap")
    everything = {part.name for part in panel.parts}
    assert page.figures() == panel.totals(everything - frozen)
    pressed = "[...panel.querySelectorAll('[aria-pressed=true]')].map(b => b.dataset.name)"
    assert set(page.run(pressed)) == everything - frozen


def test_it_says_how_far_backward_goes(page):
    page.at = 1
    page.set("first", 2)
    assert "stops at head: the parts below it, 2 of 3," in page.text(".say")
    reached = "[...panel.querySelectorAll('.part')].map(part => part.dataset.reached)"
    assert page.run(reached) == ["true", "false", "false"]
    assert page.text("output") == "up to layer 1"
    page.click("[data-name='head']")
    assert "Nothing trains" in page.text(".say")
    page.click("[data-name='embeddings']")
    assert page.text("output") == "a choice of your own"
    assert page.figures() == totals(FEW, {"layer 1", "head"})
    assert page.run("panel.querySelector('.part .activations').style.width") != "0%"


def test_bad_input_raises():
    with pytest.raises(ValueError, match="source is empty"):
        FreezingPanel([])
    shared = Recipe("deberta-v3-base-tiny", batch_size=1, seq_len=16)
    with pytest.raises(ValueError, match="no sum under this recipe"):
        FreezingPanel(shared)
