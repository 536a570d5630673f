"""The grid of combinations, its front, and the panel in a browser against Python's figures."""

import itertools

import pytest

from memlab import Recipe, find_gpu, formula
from memlab.book.chapters.ablation import (
    CHOICES,
    LENGTH,
    SAMPLES,
    SWITCHES,
    AblationPanel,
    Point,
    as_quick,
    combinations,
    fields_of,
    front,
    plainest,
)

pytestmark = pytest.mark.slow  # a browser beside Python: left to make nightly

PLACES = list(itertools.product(("bert-large", "llama-3.2-1b"), ("T4", "RTX-4090")))
NAMES = list(SWITCHES)


@pytest.fixture(scope="module")
def grid():
    return {place: combinations(*place) for place in PLACES}


@pytest.fixture(scope="module")
def page(open_once, grid):
    return open_once(AblationPanel(grid))


def test_the_grid_has_every_sensible_combination_once(grid):
    assert len(CHOICES) == len(set(CHOICES)) >= 200
    precision, trained = NAMES.index("precision"), NAMES.index("trained")
    no_bf16 = [one for one in CHOICES if not one[precision].startswith("bf16")]
    assert [point.choice for point in grid["bert-large", "T4"]] == no_bf16
    fp16 = [one for one in CHOICES if one[precision] == "fp16-amp" and one[trained] == "QLoRA"]
    with_bf16 = [one for one in CHOICES if one not in fp16]
    assert fp16 and [point.choice for point in grid["bert-large", "RTX-4090"]] == with_bf16


def test_qlora_stands_beside_a_lora_of_the_same_precision_and_casts_nothing():
    for choice in CHOICES:
        if choice[-1] == "QLoRA":
            qlora, lora = (fields_of((*choice[:-1], one)) for one in ("QLoRA", "LoRA"))
            changed = {name for name in qlora if qlora[name] != lora.get(name)}
            assert changed == {"base", "double_quant", "upcast"} and not qlora["upcast"]
    on_card = [p.choice[2] for p in combinations("bert-large", "RTX-4090") if "QLoRA" in p.choice]
    assert set(on_card) == {"bf16"}  # under autocast LoRA's base is in fp32


def test_each_step_has_the_same_samples_and_plain_comes_first():
    recipes = [Recipe("bert-large", seq_len=LENGTH, **fields_of(choice)) for choice in CHOICES]
    assert {r.batch_size * r.accumulation for r in recipes} == {SAMPLES}
    assert len(set(recipes)) == len(recipes)
    fused = Recipe("bert-large", batch_size=SAMPLES, optimizer="adamw_torch_fused")
    assert recipes[0] == fused


def test_a_point_is_what_the_formula_says(grid):
    card = find_gpu("RTX-4090").without_limit()
    for point in grid["bert-large", "RTX-4090"][::29]:
        run = formula(Recipe("bert-large", seq_len=LENGTH, **fields_of(point.choice)), card)
        parts = ("parameters", "gradients", "optimizer_states")
        assert point.peak == run.peak_allocated and point.seconds == run.step_seconds.expected
        assert point.kept == sum(run.breakdown[name] for name in parts)
        assert point.span == (run.step_seconds.low, run.step_seconds.high)


def test_nothing_beats_the_front_and_it_beats_the_rest(grid):
    for points in grid.values():
        best = front(points)
        for a, b in itertools.pairwise(best):
            assert a.seconds <= b.seconds and a.peak > b.peak
        for point in points:
            assert any(b.peak <= point.peak and b.seconds <= point.seconds for b in best)


def test_of_equal_points_one_is_on_the_front():
    a, b, c = (Point((), peak, seconds, 0) for peak, seconds in ((2, 1.0), (2, 1.0), (1, 3.0)))
    assert front([c, b, a]) == [a, c]


def test_the_plainest_of_the_quick_is_no_eager_one():
    names = ("bf16, sdpa", "bf16-amp, sdpa", "bf16", "2 x 2, bf16-amp, sdpa")
    choices = {}
    for choice in CHOICES:
        choices.setdefault(Point(choice, 0, 0.0, 0).name, choice)
    a, b, c, d = (Point(choices[name], 1, 1.0 + i / 12, 0) for i, name in enumerate(names))
    slow = Point(choices["sdpa"], 1, 1.4, 0)
    assert as_quick([slow, d, c, b, a]) == [d, c, b, a]
    assert plainest([a, b, c, d]) == b and plainest([c, d]) == d and plainest([a, c]) == a


def show(page, grid, place):
    page.set("model", place[0])
    page.set("card", place[1])
    return grid[place]


def walk(page, key):
    page.run(f"""panel.querySelector('svg').dispatchEvent(
        new KeyboardEvent('keydown', {{ key: '{key}', bubbles: true }}))""")


def assert_met(page, point, points, model):
    plain, met = points[0], page.figures()
    kib = 1024  # as exact as the panel's data are
    assert met["peak"] == pytest.approx(point.peak, abs=kib)
    assert met["kept"] == pytest.approx(point.kept, abs=kib)
    assert met["seconds"] == pytest.approx(point.seconds, abs=1e-6)
    assert met["share"] == pytest.approx(point.peak / plain.peak, rel=1e-4)
    assert met["speed"] == pytest.approx(plain.seconds / point.seconds, rel=1e-3)
    recipe = eval(page.text("code"), {"Recipe": Recipe})
    assert recipe == Recipe(model, seq_len=LENGTH, **fields_of(point.choice))


@pytest.mark.parametrize("place", PLACES)
def test_the_keys_meet_every_recipe_with_pythons_figures(page, grid, place):
    points = show(page, grid, place)
    met = set()
    for _ in points:
        walk(page, "ArrowUp")
        number = page.run("Number(panel.dataset.met)")
        point = next(p for p in points if p.choice == CHOICES[number])
        met.add(point.choice)
        if len(met) % 9 == 0:
            assert_met(page, point, points, place[0])
    assert len(met) == len(points)


@pytest.mark.parametrize("place", PLACES)
def test_buttons_walk_along_the_front(page, grid, place):
    points = show(page, grid, place)
    best = front(points)
    page.run("panel.dataset.met = ''")
    for _ in range(len(best) + 1):  # until it comes round to the first
        page.click(".forth")
        if page.text(".say").find(f"On the front, 1 of {len(best)}") >= 0:
            break
    for point in best[1:]:
        page.click(".forth")
        assert_met(page, point, points, place[0])
    page.click(".back")
    assert_met(page, best[-2], points, place[0])


def test_a_point_under_the_pointer_is_met(page, grid):
    points = show(page, grid, PLACES[1])
    page.set("x", "rate")
    page.set("y", "rest")
    smallest = min(points, key=lambda p: p.peak - p.kept)
    page.run("""(() => {
        const svg = panel.querySelector('svg'), frame = svg.getBoundingClientRect();
        const low = [...svg.querySelectorAll('circle:not(.met)')].reduce(
            (a, b) => Number(b.getAttribute('cy')) > Number(a.getAttribute('cy')) ? b : a);
        svg.dispatchEvent(new PointerEvent('pointermove', { bubbles: true,
            clientX: frame.left + Number(low.getAttribute('cx')),
            clientY: frame.top + Number(low.getAttribute('cy')) }));
    })()""")
    found = page.figures()
    assert found["peak"] - found["kept"] == pytest.approx(smallest.peak - smallest.kept, abs=2048)
    page.set("x", "seconds")
    page.set("y", "peak")


def test_it_draws_a_circle_for_each_and_the_limit_of_the_card(page, grid):
    points = show(page, grid, ("llama-3.2-1b", "T4"))
    assert page.run("panel.querySelectorAll('circle:not(.met)').length") == len(points)
    assert page.run("panel.querySelectorAll('circle.best').length") == len(front(points))
    assert "T4" in page.text("svg") and page.run("panel.querySelectorAll('.limit').length") == 1
    page.set("colour", "optimizer")
    assert "8-bit AdamW" in page.text(".keys")
    assert page.run("document.documentElement.scrollWidth <= innerWidth")


def test_its_data_are_small(grid):
    assert len(AblationPanel(grid)._repr_html_()) < 80_000


@pytest.mark.parametrize("wrong", [[(PLACES[0], [])], [(PLACES[0], [1]), (PLACES[3], [1])]])
def test_a_pair_without_points_is_refused(wrong):
    with pytest.raises(ValueError, match="allowed are some for each pair"):
        AblationPanel(dict(wrong))
