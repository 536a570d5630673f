"""Chapter 15: its sums are those of the formula, and its recipes are what it says of them."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
from notebook import Notebook

from memlab import Recipe, models, simulate
from memlab.book import small_config
from memlab.book.chapters.ablation import SWITCHES, Point, fields_of

CHAPTER = Notebook("15-ablation")
# Cells without a training, in the order of the chapter.
SUMS = """imports source printed lines shares nine-table sets sets-run order-table pairs lora-batch
    grid front-table"""
LOOPS = "in-backward fused-step makers reader learners learners-more pruning"


@pytest.fixture(scope="module")
def chapter():
    return CHAPTER.run(f"{SUMS} {LOOPS} buggy")


@pytest.mark.slow
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
    assert chapter["held"](run) == (13939 - 1343) * 2**20


def test_shares_of_the_plain_run_have_one_context_on_both_sides(chapter):
    gib, guides = 2**30, 1343 * 2**20
    card_gives = {"vanilla": 12 * gib, "ninth": 4 * gib, "swift_run": 3 * gib}
    names = {"vanilla": "vanilla", chapter["last"]: "ninth"}
    of_nine = {Recipe(**run.recipe): names.get(n) for n, run in chapter["nine"].items()}

    def gives(recipe, card):
        return SimpleNamespace(peak_reserved=card_gives.get(of_nine.get(recipe, "swift_run"), 0))

    own = chapter | {"simulate": gives}
    CHAPTER.run("shares", own)
    assert own["swift_recipe"] in [
        Recipe("bert-large", seq_len=512, **fields_of(p.choice)) for p in own["smaller"]
    ]
    for name, nbytes in card_gives.items():
        assert own["share"](own[name]) == (nbytes + guides) / (12 * gib + guides)
        assert own["share"](own[name], gib) == (nbytes + gib) / (13 * gib)


def test_what_the_pairs_the_fronts_and_the_takeaways_conclude_is_so(chapter):
    CHAPTER.run("alone pairs-words front-words front-said takeaways-held", chapter)  # assert
    smallest = [row["recipe"] for name, row in chapter["named"].items() if "smallest" in name]
    assert len(smallest) == 9 and all(r.startswith("1 x 4, checkpoints") for r in smallest)
    assert all("LoRA" in recipe for recipe in smallest)


def test_checkpoints_that_save_less_alone_are_not_said_to_save_nearly_all(chapter):
    sets, alone = dict(chapter["sets"]), frozenset(["checkpointing"])
    more = sets[alone].peak_allocated + 512 * 2**20
    sets[alone] = dataclasses.replace(sets[alone], peak_allocated=more)
    own = chapter | {"sets": sets}
    with pytest.raises(AssertionError):
        CHAPTER.run("alone", own)


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


def test_each_named_recipe_fits_and_is_on_its_front(chapter):
    named, grid = chapter["named"], chapter["grid"]
    for (model, card), points in grid.items():
        short = chapter["short"][model]
        rows = {k: v for k, v in named.items() if k.startswith(f"{short}, {card}:")}
        peaks = [row["GiB"] for row in rows.values()]
        usable = chapter["find_gpu"](card).usable / 2**30
        assert peaks and peaks == sorted(peaks, reverse=True) and peaks[0] <= 0.95 * usable
        assert set(peaks) <= {p.peak / 2**30 for p in chapter["front"](points)}


def small_model(chapter):
    return models.build(chapter["config"], seed=3)


def test_a_step_in_backward_is_the_plain_step(chapter):
    ours, plain = small_model(chapter), small_model(chapter)
    rows = chapter["seen"][:4]
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
    CHAPTER.run("lora-batch", chapter)  # gives `half`
    source = CHAPTER.code["far-run"].partition("\n\n\n")[0]
    exec(source, chapter)
    run = chapter["simulated"](chapter["MAKERS"]["8-bit Lion"])
    monkeypatch.undo()
    recipe = chapter["half"].but(model=few, checkpointing=True, optimizer="lion_8bit")
    usual = simulate(recipe, "V100")
    largest = 30522 * 1024 * 4
    assert run.breakdown["gradients"] <= largest < usual.breakdown["gradients"]
    assert run.peak_allocated < usual.peak_allocated - usual.breakdown["gradients"] / 2


def test_ways_that_only_cut_the_batch_learn_the_same(chapter, monkeypatch):
    monkeypatch.setitem(chapter, "STEPS", 4)
    nine, run = chapter["nine"], chapter["in_ones_way"]
    plain, plain_end = run(nine["vanilla"].recipe, 1)
    for name in ("accumulation", "accumulation, checkpointing"):
        losses, end = run(nine[name].recipe, 1)
        assert losses == pytest.approx(plain, abs=1e-4) and end == pytest.approx(
            plain_end, abs=1e-3
        )
    assert plain[-1] < plain[0] - 0.05


def test_each_way_sees_the_same_samples(chapter):
    one, other = (torch.cat(chapter["steps_of"](seed)) for seed in (0, 1))
    assert one.shape == (chapter["STEPS"] * chapter["SEQUENCES"], 32)
    assert torch.equal(one, torch.cat(chapter["steps_of"](0))) and not torch.equal(one, other)


def test_pruning_masks_half_of_each_inner_matrix(chapter):
    model = small_model(chapter)
    chapter["pruned"](model)
    masks = dict(model.named_buffers())
    masks = [mask for name, mask in masks.items() if name.endswith("weight_mask")]
    assert len(masks) == 4 and all(mask.mean() == 0.5 for mask in masks)


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
