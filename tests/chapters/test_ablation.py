"""Chapter 15: its sums are those of the formula, and its recipes are what it says of them."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from notebook import Notebook

from memlab import Recipe, models, simulate
from memlab.book import small_config
from memlab.book.chapters import ablation_runs, ablation_views
from memlab.book.chapters.ablation import SWITCHES, Point
from memlab.book.chapters.ablation_views import held
from memlab.card.step_time import ANCHORED

CHAPTER = Notebook("15-ablation")
pytestmark = pytest.mark.slow  # make book runs the cells, and compares what the text says of them
# Cells without a training, in the order of the chapter.
SUMS = """imports source printed better shares first-words nine-table nine-words sets sets-run
    order-table order-words pairs alone grid front-table front-words"""
LOOPS = "in-backward fused-step makers"


@pytest.fixture(scope="module")
def chapter():
    own = CHAPTER.run(f"{SUMS} {LOOPS} buggy")
    return own | {"student": ablation_runs.reader("cpu", own["RATE"])}


def test_the_nine_rows_are_near_what_was_printed(chapter):
    table = chapter["table"]
    assert len(table) == 9
    assert table["error in bytes"].abs().max() < 0.16
    assert table["error in seconds"].abs().max() < 0.27


def test_the_rows_are_the_records_own_figures(chapter):
    run, row = chapter["nine"]["fp16"], chapter["table"].loc["fp16"]
    ran = simulate(Recipe(**run.recipe), "V100")
    assert row["MiB"] * 2**20 == ran.peak_reserved + run.figures["context_bytes"]
    printed = run.figures["device_used_bytes"]
    assert row["error in bytes"] == (ran.peak_reserved + 1343 * 2**20) / printed - 1 < 0
    assert row["s printed"] == run.figures["run_seconds"]
    assert held(run) == (13939 - 1343) * 2**20


def test_shares_of_the_plain_run_have_one_context_on_both_sides(chapter):
    gib, guides = 2**30, 1343 * 2**20
    plain, other = (SimpleNamespace(peak_reserved=n * gib) for n in (12, 4))
    own = chapter | {"vanilla": plain}
    exec(CHAPTER.code["shares"].partition("\n\n\n")[2], own)
    assert own["share"](other) == (4 * gib + guides) / (12 * gib + guides)
    assert own["share"](other, gib) == 5 / 13


def test_the_better_recipe_is_smaller_and_surely_faster_than_the_last_row(chapter):
    swift, last = chapter["swift"], chapter["guessed"][chapter["last"]]
    assert swift.choice[-1] == "all weights" and swift.peak < last.peak_allocated
    assert ANCHORED * swift.seconds < last.step_seconds.expected
    assert chapter["share"](chapter["swift_run"]) < chapter["share"](chapter["ninth"])


def test_each_switch_saves_most_first_and_two_change_sign(chapter):
    order = chapter["order"]
    assert (order["first, MiB"] == order["most"]).all()
    fixed = order["most"] - order["least"] < 1
    signs = order["first, MiB"] * order["last, MiB"] < 0
    assert list(fixed[fixed].index) == ["8-bit AdamW"]
    assert list(signs[signs].index) == ["accumulation", "fp16"]
    assert order["time, last"]["accumulation"] > ANCHORED
    assert order["time, last"]["fp16"] < 0.5
    assert chapter["everything"] - chapter["lightest"] == {"accumulation"}


def test_8_bit_states_work_against_nothing_and_checkpoints_alone_nearly_suffice(chapter):
    pairs, alone = chapter["pairs"], chapter["alone"]
    assert pairs["8-bit AdamW"].abs().max() < 1 and pairs.max().max() < 1
    assert max(alone["accumulation"], alone["sdpa"]) < 0.75 < 0.95 < alone["checkpointing"] <= 1


def test_no_front_computes_in_fp32_or_with_eager_attention(chapter):
    spared, on_front = chapter["spared"], chapter["on_front"]
    assert spared and not set(spared) & set(on_front)
    assert {p.choice[-1] for p in spared} == {"all weights"}
    assert chapter["fp16_time"] < 1 / ANCHORED


def test_sdpa_needs_no_more_bytes_and_only_adapters_fit_the_8b_on_small_cards(chapter):
    for place, points in chapter["grid"].items():
        peaks = {p.choice: p.peak for p in points}
        for choice, peak in peaks.items():
            assert peaks[tuple("sdpa" if one == "eager" else one for one in choice)] <= peak
        if place in (("llama-3-8b", "T4"), ("llama-3-8b", "RTX-4090")):
            room = 0.95 * chapter["find_gpu"](place[1]).usable
            assert {p.choice[-1] for p in points if p.peak <= room} <= {"LoRA", "QLoRA"}


def test_with_checkpoints_the_whole_batch_is_smaller_than_pieces(chapter):
    """The takeaway: under autocast, all weights; adapters are smallest in pieces."""
    by = {(place, p.choice): p for place, points in chapter["grid"].items() for p in points}
    for (place, choice), at_once in by.items():
        if choice[:2] != ("4 x 1", "checkpoints"):
            continue
        pieces = [by[place, (cut, *choice[1:])] for cut in ("2 x 2", "1 x 4")]
        if choice[-1] != "all weights":
            assert all(p.peak < at_once.peak for p in pieces)
        elif choice[2].endswith("amp"):
            assert all(at_once.peak < p.peak for p in pieces)
            assert all(at_once.seconds < p.seconds for p in pieces)


@pytest.mark.parametrize("order", [1, -1])
def test_savings_of_any_order_add_up_to_the_whole(chapter, order):
    names, sets = list(chapter["SWITCHES"])[::order], chapter["sets"]
    steps = [chapter["saving"](n, frozenset(names[:i])) for i, n in enumerate(names)]
    first, last = sets[frozenset()], sets[frozenset(names)]
    whole = (first.peak_allocated - last.peak_allocated) / 2**20
    assert sum(mib for mib, _ in steps) == pytest.approx(whole)
    product = first.step_seconds.expected
    for _, factor in steps:
        product *= factor
    assert product == pytest.approx(last.step_seconds.expected)


def test_an_interaction_is_what_two_save_beyond_each(chapter):
    saving, interaction = chapter["saving"], chapter["interaction"]
    for a, b in itertools.combinations(chapter["SWITCHES"], 2):
        alone = saving(a, frozenset())[0] + saving(b, frozenset())[0]
        together = saving(a, frozenset())[0] + saving(b, frozenset([a]))[0]
        assert interaction(a, b) == pytest.approx(together - alone)
        assert interaction(a, b) == pytest.approx(interaction(b, a))
        assert chapter["pairs"][a][b] == interaction(a, b)


def test_the_peak_of_all_switches_is_the_simulations(chapter):
    everything = chapter["sets"][chapter["everything"]]
    fields = {k: v for one in chapter["SWITCHES"].values() for k, v in one.items()}
    run = simulate(chapter["start"].but(**fields), "V100")
    assert everything.peak_tensors == pytest.approx(run.peak_tensors, rel=1e-3)


def test_named_are_the_plainest_of_the_quick_and_the_smallest(chapter):
    named = chapter["named"]
    for (model, card), points in chapter["grid"].items():
        place = f"{ablation_views.SHORT[model]}, {card}"
        quick, more, smallest = named[place]
        room = 0.95 * chapter["find_gpu"](card).usable
        fit = [p for p in points if p.peak <= room]
        near = [p for p in fit if p.seconds <= ANCHORED * min(p.seconds for p in fit)]
        assert quick in near and len(near) == more + 1
        assert smallest.peak == min(p.peak for p in fit) and smallest in chapter["front"](points)
        assert smallest.choice[:2] == ("1 x 4", "checkpoints") and smallest.choice[-1] == "QLoRA"


def small_model(chapter):
    return models.build(chapter["student"].config, seed=3)


def test_a_step_in_backward_is_the_plain_step(chapter):
    ours, plain = small_model(chapter), small_model(chapter)
    rows = chapter["student"].seen[:4]
    chapter["step_in_backward"](ours, lambda w: torch.optim.SGD(w, 0.5))
    sgd = torch.optim.SGD(plain.parameters(), 0.5)
    for _ in range(3):
        loss = ours(input_ids=rows, labels=rows).loss
        (loss * 2.0**10).backward()
        plain(input_ids=rows, labels=rows).loss.backward()
        sgd.step()
        sgd.zero_grad()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        assert a.grad is None


def test_a_step_in_backward_holds_no_gradients(chapter, monkeypatch):
    few = small_config("bert-large", dropout=0.1, num_hidden_layers=2)
    build = models.build
    monkeypatch.setattr(models, "build", lambda name, **how: build(few, **how))
    make = chapter["MAKERS"]["8-bit Lion"]
    own = chapter["step_in_backward"], make, chapter["one_pass"]
    run = ablation_runs.bert_in_backward(*own)
    monkeypatch.undo()
    recipe = Recipe(few, batch_size=4, precision="fp16-amp", attention="sdpa")
    usual = simulate(recipe.but(checkpointing=True, optimizer="lion_8bit"), "V100")
    largest = 30522 * 1024 * 4
    assert run.breakdown["gradients"] <= largest < usual.breakdown["gradients"]
    assert run.peak_allocated < usual.peak_allocated - usual.breakdown["gradients"] / 2


@pytest.mark.parametrize("number, wrong", [(1, 1500), (2, 3.5), (3, 0)])
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(chapter, capsys, number, wrong):
    CHAPTER.check_exercise(number, wrong, chapter, capsys)


def test_the_buggy_front_names_what_is_beaten(chapter):
    choice = tuple(next(iter(settings)) for settings in SWITCHES.values())
    peaks = [5, 9, 8, 1]  # the third is smaller than its neighbour alone
    points = [Point(choice, peak, float(i), 0) for i, peak in enumerate(peaks)]
    assert [p.peak for p in chapter["buggy_front"](points)] == [8, 1]
    assert [p.peak for p in chapter["front"](points)] == [5, 1]


@pytest.mark.parametrize("reserved, word", [(0, "holds"), (512, "does not hold")])
def test_b23_asks_what_the_card_gives(chapter, reserved, word):
    run = SimpleNamespace(peak_reserved=2**30)
    given = {"one_way": run, "reserved_same": not reserved, "core": [True], "difference": 7}
    assert CHAPTER.verdict("B23", chapter | given) == word
