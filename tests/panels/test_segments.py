"""Segments of the page hold what Python counts, and what a traced chain really holds."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from memlab import SimulatedGPU
from memlab.card.kernels.rules import RULES
from memlab.panels.segments import SegmentFilm, figures, held

pytestmark = pytest.mark.slow  # a browser beside Python: left to make nightly

WIDTH, ROWS = 256, 4096
UNIT = WIDTH * ROWS * 4


@pytest.fixture(scope="module")
def page(open_once):
    return open_once(SegmentFilm())


@pytest.mark.parametrize("layers", [2, 7, 48])
@pytest.mark.parametrize("segment", [0, 1, 2, 5, 48])
@pytest.mark.parametrize("ratio", [1, 4, 40])
def test_the_page_says_what_python_computes(page, layers, segment, ratio):
    for name, value in dict(layers=layers, segment=segment, ratio=ratio).items():
        page.set(name, value)
    assert page.figures() == figures(layers, segment, ratio)


@pytest.mark.parametrize("layers, segment, ratio", [(9, 0, 4), (9, 3, 4), (7, 2, 5), (6, 1, 3)])
def test_each_moment_is_pythons_and_bars_add_up_to_it(page, layers, segment, ratio):
    for name, value in dict(layers=layers, segment=segment, ratio=ratio).items():
        page.set(name, value)
    for at, units in enumerate(held(layers, segment, ratio)):
        page.set("moment", at)
        assert page.run("Number(panel.dataset.held)") == units
        strong = page.run("""[...panel.querySelectorAll('.rows rect:not(.late)')].map(
            bar => [bar.dataset.layer, Number(bar.dataset.units)])""")
        biggest = {}
        for layer, size in strong:  # what a layer keeps has its checkpoint in it
            biggest[layer] = max(size, biggest.get(layer, 0))
        assert sum(biggest.values()) == units
    page.set("moment", len(held(layers, segment, ratio)))
    assert "At most" in page.text(".say")


def trace(layers, segment):
    """Units at the end of forward, and the most, of a chain whose layers keep 4 inputs."""

    def keep_all(steps, x):
        for step in steps:
            x = step(x)
        return x

    def forward(steps, x):
        for i in range(0, layers, segment):
            x = checkpoint(keep_all, steps[i : i + segment], x, use_reentrant=True)
        return x

    # The figures are of tensors that last: not of the buffers of sums.
    with SimulatedGPU(rules=frozenset(RULES) - {"sums of rows"}) as gpu:
        chain = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(WIDTH, 3 * WIDTH),
                torch.nn.Tanh(),
                torch.nn.Linear(3 * WIDTH, WIDTH),
            )
            for _ in range(layers)
        ).cuda()
        gpu.watch(chain)
        x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
        gpu.reset_peak()
        (forward if segment else keep_all)(chain, x).sum().backward()
    line = gpu.footprint.timeline
    both = zip(line.levels["activations"], line.levels["temporary"], strict=True)
    units = [(a + b) // UNIT for a, b in both]
    return units[line.phases.index("backward") - 1], max(units)


@pytest.mark.parametrize("layers", [9, 16])
@pytest.mark.parametrize("segment", [0, 1, 2, 4, 9])
def test_a_traced_chain_holds_it_and_the_gradients_on_their_way(layers, segment):
    said, (forward, most) = figures(layers, segment, 4), trace(layers, segment)
    assert forward == said["forward"]
    assert 6 <= most - said["peak"] <= 8  # two wide gradients, one or two narrow ones


def test_the_best_distance_is_about_the_root():
    for layers, ratio in ((36, 1), (16, 4), (48, 3)):
        root = (layers / ratio) ** 0.5
        best = figures(layers, 0, ratio)["best"]
        assert abs(best - root) <= 2
        assert figures(layers, best, ratio)["peak"] <= 2 * (layers * ratio) ** 0.5 + 1


def test_it_plays_and_goes_round(page):
    page.set("layers", 4)
    page.set("segment", 2)
    page.click(".forth")
    assert page.moment() == 0
    page.click(".back")
    assert page.moment() == 12
    page.click(".play")
    assert 1 <= page.moment(after=2300) < 12
    page.set("ratio", 3)
    assert page.text(".play") == "play" and page.moment() == 12


@pytest.mark.parametrize(
    "wrong, says",
    [
        (dict(layers=1), "layers is 1: allowed are whole numbers from 2 to 48"),
        (dict(layers=8, segment=9), "segment is 9: allowed are whole numbers from 0 to 8"),
        (dict(ratio=2.5), "ratio is 2.5"),
    ],
)
def test_bad_input_raises(wrong, says):
    with pytest.raises(ValueError, match=says):
        SegmentFilm(**wrong)
