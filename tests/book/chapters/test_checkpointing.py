"""What chapter 8 counts: ways of small layers, real layers, the compiler's plan, offload."""

import pytest
import torch

from memlab.book.chapters import checkpointing as chapter
from memlab.book.chapters.checkpointing import held, make_layers, passes, run_all


def gradients(way, layers, x):
    layers.zero_grad()
    x = x.clone().requires_grad_()
    way(layers, x).square().sum().backward()
    return [x.grad, *(weight.grad for weight in layers.parameters())]


def under(depth, reentrant):
    def way(layers, x):
        return run_all([chapter.nested(layer, depth, reentrant) for layer in layers], x)

    return way


ANY_WAY = {"on demand": chapter.on_demand}
ANY_WAY |= {f"{depth}, {form}": under(depth, form) for depth in (0, 1, 2) for form in (True, False)}


@pytest.mark.parametrize("name", ANY_WAY)
def test_a_way_gives_the_gradient_of_ordinary_training(name):
    torch.manual_seed(0)
    layers, x = make_layers(5, width=8), torch.randn(5, 8)
    torch.testing.assert_close(gradients(ANY_WAY[name], layers, x), gradients(run_all, layers, x))


def test_work_and_memory_of_a_walk_from_the_first_input():
    table = chapter.prices({"all": run_all, "on demand": chapter.on_demand}, 8)
    assert table["passes"].tolist() == pytest.approx([3, 3 + (8 + 1) / 2])
    assert table["units held"]["all"] > 2 * table["units held"]["on demand"]
    assert passes(run_all, 3, frozen=True) == pytest.approx(2)
    assert held(run_all, 3) - held(run_all, 2) == pytest.approx(4, abs=0.01)


@pytest.mark.parametrize("k", [1, 2])
def test_the_lines_of_llamas_layers_go_on_as_they_begin(k):
    """Two and four segments are simulated; the page goes on to 80 layers, here it is 16."""
    far = chapter.stack(chapter._llama, 16, k)
    assert far == pytest.approx(chapter._line(chapter._llama, k, "sdpa")(16), abs=0.01)


def test_a_line_of_berts_layers_goes_on_to_24():
    line = chapter._line(chapter._bert, 2, "sdpa")
    assert chapter.stack(chapter._bert, 24, 2) == pytest.approx(line(24), abs=0.5)


def test_a_smaller_budget_saves_less_and_computes_more():
    table = chapter.budgets(1.0, 0.75, 0.5, 0.0)
    saved, more = table["units saved"], table["more work, %"]
    assert saved.is_monotonic_decreasing and saved.iloc[-1] == pytest.approx(1, abs=0.1)
    assert saved.iloc[1] < 0.8 * saved.iloc[0] and more.iloc[1] < 1
    assert more.iloc[2] < more.iloc[3] / 2 < 17


def test_offloading_frees_the_card_and_counts_what_travels():
    tried = {way: chapter.offload_trial(way, 3) for way in chapter.OFFLOAD}
    kept, moved, marked, both = (run.breakdown["activations"] for run, _ in tried.values())
    assert moved < marked < kept and both < marked
    assert tried["checkpointing"][1] == [32 * 512 * 768 * 4] * 3  # the inputs of three layers
    assert sum(tried["all kept"][1]) > 10 * sum(tried["checkpointing"][1])
    # Of a layer: 4 x 768 ** 2 and 8 x 768 ** 2 weights and two products with the tokens.
    once = 2 * 32 * 512 * (12 * 768**2 + 2 * 512 * 768)
    assert chapter.operations(1) == pytest.approx(3 * once, rel=0.1)


def test_only_the_reentrant_form_computes_a_nested_segment_again():
    reentrant = [chapter.nested_passes(depth, True) for depth in range(3)]
    once, twice = (chapter.nested_passes(depth, False) for depth in (1, 2))
    assert reentrant == pytest.approx([3, 4, 5]) and once == pytest.approx(twice, abs=0.01)
