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
