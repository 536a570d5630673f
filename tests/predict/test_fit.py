"""Does it fit? With the margin, and never a false yes on a run that is on record."""

import dataclasses

import pytest
import torch
from helpers import refused

from memlab import MiB, Recipe, measure, models, simulate
from memlab.evidence.records import find_records
from memlab.gpus import GPUS, gpu_of_device
from memlab.predict.fit import CONTEXT_MARGIN, MARGIN, _last, fits, largest, room, verdict
from memlab.predict.simulate import full_log

TINY = Recipe(model="gpt2-tiny", batch_size=2, seq_len=64)
ON_RECORD = [run for run in find_records("published", loop="") if gpu_of_device(run.device)]
# Those that the grid has first: their traces come with memlab.
HERE = find_records("recorded", loop="", device="NVIDIA")[:10]


def test_a_small_training_fits_and_says_what_it_needs():
    fit = fits(TINY, "T4")
    alone = simulate(TINY, "T4")
    assert fit and fit.fits
    assert fit.footprint == alone
    assert fit.needed == alone.peak_reserved + GPUS["T4"].context
    assert fit.margin == int(MARGIN * fit.needed) + CONTEXT_MARGIN
    assert str(fit).startswith("fits: ") and "the card has 14.56 GiB" in str(fit)


def test_the_border_is_where_need_and_margin_say():
    peak = simulate(TINY, 2**40)
    enough = peak.peak_reserved + int(MARGIN * peak.peak_reserved)
    assert fits(TINY, enough)
    # Below the allocated bytes and the margin no emptied cache helps.
    assert not fits(TINY, peak.peak_allocated + int(MARGIN * peak.peak_reserved) - 1)
    assert not fits(TINY, enough, margin=0.5)


def test_a_cache_that_is_given_back_makes_room():
    """Reserved memory passes the card, but not what is allocated: the allocator retries."""
    recipe = Recipe(model="bert-base", batch_size=4, seq_len=256)
    peak = simulate(recipe, 2**40)
    assert peak.peak_allocated * 1.06 < peak.peak_reserved
    tight = fits(recipe, peak.peak_reserved, margin=0.001)
    assert tight
    assert tight.needed < peak.peak_reserved == tight.total_memory


@pytest.mark.slow
def test_segments_that_grow_make_room_where_only_fragments_were_in_the_way():
    """An emptied cache is not enough there: some of each segment is in use."""
    recipe, total = Recipe(model="bert-base", batch_size=4, seq_len=256), 2310 * MiB
    grow = recipe.but(expandable_segments=True)
    assert not fits(recipe, total, margin=0.001)
    assert fits(grow, total, margin=0.001)
    with pytest.raises(torch.OutOfMemoryError, match="memory in use"):
        simulate(recipe, total)
    alone, plain = simulate(grow, total), simulate(recipe, 2**40)
    assert fits(grow, total, margin=0.001).footprint == alone
    assert alone.peak_reserved < total < plain.peak_reserved
    # Blocks of segments that do not grow may have up to 1 MiB more than was asked for.
    assert alone.peak_tensors == plain.peak_tensors
    assert alone.peak_allocated <= plain.peak_allocated
    assert largest(grow, total).value >= largest(recipe, total).value


def answered(run):
    """The verdict on a run on record, on a card just too small for what it used."""
    card = gpu_of_device(run.device)
    total = run.figures.get("total_memory_bytes", card.total_memory)
    context = run.figures.get("context_bytes", card.context)
    if run in HERE:  # what was reserved beyond need not have been
        total = run.figures["peak_allocated_bytes"] + context - 1
    elif not run.figures.get("out_of_memory"):
        total = run.figures["device_used_bytes"] - 1
    card = dataclasses.replace(card, total_memory=total, context=context)
    margin = 0.2 if run.date < "2023-03-15" else MARGIN  # before PyTorch 2
    recipe = Recipe(**run.recipe)
    return verdict(recipe, full_log(recipe, card), card, margin)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("run", [*ON_RECORD, *HERE], ids=lambda run: run.name)
def test_no_false_yes_on_a_run_on_record(run):
    assert not answered(run).fits


def test_the_nine_published_runs():
    """Source: the Hugging Face guide of transformers 4.20.1, on a V100 in January 2022."""
    published = find_records("published", device="V100")
    used = {run.name: run.figures["device_used_bytes"] for run in published}
    needed = {run.name: answered(run).needed for run in published}
    assert len(published) == 9
    assert needed == pytest.approx(used, rel=0.15)
    assert sorted(used, key=used.get) == sorted(needed, key=needed.get)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("T5",), "gpu is 'T5'"),
        (("T4", -0.1), "margin is -0.1"),
        (("T4", float("nan")), "margin is nan"),
        (("T4", 5), "margin is 5: allowed are numbers from 0 to below 1"),
    ],
)
def test_bad_input(arguments, says):
    with refused(says):
        fits(TINY, *arguments)


@pytest.mark.parametrize("ask", [fits, simulate, largest, measure])
def test_a_name_is_no_recipe(ask):
    with refused("recipe is 'gpt2-tiny': allowed are a memlab.Recipe"):
        ask("gpt2-tiny", "cpu" if ask is measure else "T4")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("field", "step"), [("batch_size", 1), ("seq_len", 64)])
@pytest.mark.parametrize("start", [1, 300])
def test_the_largest_fits_and_the_next_does_not(field, step, start):
    """Wherever the search begins."""
    found = largest(TINY.but(**{field: start}), 100 * MiB, field)
    assert getattr(found.recipe, field) == found.value > 0
    assert found.next == found.value + step
    assert found.fit and fits(found.recipe, 100 * MiB)
    assert not fits(found.recipe.but(**{field: found.next}), 100 * MiB)
    assert str(found).startswith(f"largest {field}: {found.value} ({found.next} does not fit)")


@pytest.mark.parametrize(("length", "value"), [(500, 500), (511, 448), (448, 448)])
def test_a_length_that_fits_is_answered_though_it_is_no_multiple(length, value):
    recipe, size = TINY.but(batch_size=8, seq_len=length), 560 * MiB
    assert bool(fits(recipe, size)) == (length < 511)
    found = largest(recipe, size, "seq_len")
    assert (found.value, found.next, found.recipe.seq_len) == (value, 512, value)
    assert found.fit and not fits(recipe.but(seq_len=512), size)


def test_a_loss_in_parts_has_a_longest_sequence_too():
    parts = Recipe("llama-3-8b-tiny", seq_len=64, attention="sdpa", loss="chunked")
    found = largest(parts, 80 * MiB, "seq_len")
    assert 64 < found.value < found.next and fits(found.recipe, 80 * MiB)
    assert not fits(parts.but(seq_len=found.next), 80 * MiB)


def test_the_largest_ends_at_the_model_or_is_none():
    found = largest(TINY, "T4", "seq_len")
    assert (found.value, found.next) == (1024, None)
    found = largest(TINY, 10 * MiB)
    assert (found.value, found.next, found.recipe.batch_size) == (0, 1, 1)
    assert not found.fit and str(found).startswith("not even batch_size=1: does not fit")
    with refused("field is 'model': allowed are batch_size, seq_len"):
        largest(TINY, "T4", "model")


@pytest.mark.slow
def test_a_search_that_ends_says_why():
    window = models.resized("mistral-7b-tiny", sliding_window=128, max_position_embeddings=512)
    found = largest(Recipe(window, seq_len=64), 2**34, "seq_len")
    assert (found.value, found.next) == (512, None)  # its positions end it, and no window does
    found = largest(Recipe("bert-large-tiny", seq_len=64), 2**34, "seq_len")
    assert found.value == 512
    assert "largest seq_len: 512 (bert-large-tiny allows no larger ones)" in str(found)


def test_room_and_margin_are_one_rule():
    card = GPUS["T4"]
    free = room(card)
    assert free + int(MARGIN * free) + CONTEXT_MARGIN <= card.total_memory
    more = free + 1
    assert more + int(MARGIN * more) + CONTEXT_MARGIN > card.total_memory - 1


def test_a_size_that_fits_is_the_least_that_is_answered():
    """Reserved bytes can fall with the length: below a length that fits one may not."""
    assert _last(lambda size: size <= 2 or size == 5, 9, least=5) == 5
    assert _last(lambda size: size <= 2, 9, least=0) == 2
    assert _last(lambda size: size <= 9, 9, least=5) == 9
