"""What a plan says fits does so in a simulation, and what it says of sizes is so."""

import dataclasses
import functools
import json
import random

import pytest
import torch
from helpers import refused

from memlab import MiB, Recipe, fits, models, plan, simulate
from memlab.footprint import Category
from memlab.gpus import GPUS, find_gpu
from memlab.planner.advice import remedies_of
from memlab.planner.remedies import last_resorts
from memlab.planner.result import TIERS, Question, is_paged
from memlab.planner.search import Search
from memlab.planner.space import NF4, SHARDINGS, Combination, Recipes, combinations
from memlab.predict.simulate import peak_allocated_of, sized_log
from memlab.trace.log import peak_allocated
from memlab.workloads.training import Training

SEEDS = (0, 1, 4)  # benchmarks/plan.py asks as many as one has time for
SMALL = {"effective_batch": 4, "seq_len": 64, "lora_rank": 2}
PLAIN = {"ways": "full", "precisions": "fp16-amp"} | SMALL


def asked(seed):
    """A random question about a tiny model, on a card of some MiB."""
    draw = random.Random(seed)
    model = draw.choice(("gpt2-tiny", "bert-base-tiny", "llama-3.2-1b-tiny"))
    return {
        "model": model,
        "gpu": int(draw.uniform(20, 80)) * MiB,
        "seq_len": draw.choice((64, 200, 384)),
        "effective_batch": draw.choice((1, 6, 16)),
        "ways": draw.choice(("full", "full,lora", "lora,qlora")),
        "precisions": draw.choice(("bf16-amp", "fp16-amp")),
        "lora_rank": 4,
    }


@functools.cache
def answered(seed):
    return plan(**asked(seed))


def flat(answer):
    """The text of an answer without the ends of its lines."""
    return " ".join(str(answer).split())


def distinct(*options):
    """Those that are there, a recipe once."""
    return {str(option.recipe): option for option in options if option}.values()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_fits_is_simulated_and_the_next_size_does_not(seed):
    question = asked(seed)
    card = question["gpu"]
    answer = answered(seed)
    for option in distinct(answer.fastest, answer.roomiest, *answer.tiers.values()):
        if not option.missing:
            simulate(option.recipe, card)  # or out of memory
    if not answer:
        assert answer.remedies and all(option.missing for option in answer.tiers.values())
        return
    assert answer.roomiest.needed <= answer.fastest.needed
    for option in distinct(answer.fastest, answer.roomiest):
        assert is_paged(option.recipe.optimizer) or option.seconds > 0
        assert option.recipe.batch_size * option.recipe.accumulation == question["effective_batch"]
        sizes = {"batch_size": (option.largest_batch, 1), "seq_len": (option.longest, 64)}
        for field, (value, step) in sizes.items():
            assert fits(option.recipe.but(**{field: value}), card)
            if field == "batch_size" or not option.longest_ends:
                assert not fits(option.recipe.but(**{field: value + step}), card)


@pytest.fixture(scope="module")
def roomy():
    """A tiny model on a card where all fits."""
    return plan("gpt2-tiny", "T4", **SMALL)


@pytest.fixture(scope="module")
def tight():
    """A model whose states are larger than the card."""
    config = models.with_layers("gpt2", 4)
    config.vocab_size = 1000
    question = SMALL | {"ways": "full", "precisions": "bf16-amp", "effective_batch": 8}
    return plan(config, 200 * MiB, **question)


@pytest.mark.slow
def test_nothing_fits_says_what_would(tight):
    """The rungs before a larger card, and what they cost, are first."""
    assert not tight and tight.first is tight.fastest is tight.roomiest is None
    words = " ".join(tight.remedies)
    assert "QLoRA" in words and any(card in words for card in GPUS)
    assert "nothing fits" in flat(tight) and "cannot help" in tight.decision[0]
    (rung,) = tight.last_resorts
    assert rung.recipe.step_in_backward and rung.recipe.loss == "chunked"
    assert fits(rung.recipe, 200 * MiB)
    assert str(rung) in tight.remedies[0] and tight.remedies[0] in flat(tight)


def test_the_first_rung_costs_time_alone_and_says_what_the_host_holds():
    pytest.importorskip("torchao")
    search = Search(Question("gpt2-tiny", 64, 2), find_gpu("L4"), 0.05)
    host, backward = last_resorts(search)
    assert host.recipe.optimizer_offload == "gradients" and host.tier == 1
    assert backward.recipe.step_in_backward and backward.tier == 5
    assert host.seconds is backward.seconds is None
    assert any("the host holds" in said for said in search.answers.assumed([host]))
    assert "gradients and states on the host" in str(host)


@pytest.mark.parametrize(
    "changes", [{"gpu": "T4"}, {"ways": "lora"}, {"ranks": 2}, {"gpu": 10 * MiB}]
)
def test_the_rungs_are_of_full_finetuning_in_bf16_on_one_card(changes):
    asked = {"model": "gpt2-tiny", "gpu": "L4", "effective_batch": 2, "seq_len": 64} | changes
    question = Question(**{name: n for name, n in asked.items() if name != "gpu"})
    assert last_resorts(Search(question, find_gpu(asked["gpu"]), 0.05)) == ()


@pytest.mark.slow
def test_nothing_fits_says_how_many_cards_would(tight):
    (words,) = [words for words in tight.remedies if " x 200 MiB, with full fine-tuning" in words]
    ranks, (sharding,) = int(words.split()[0]), [kind for kind in SHARDINGS if kind in words]
    recipe = {"seq_len": 64, "precision": "bf16-amp", "optimizer": "adamw_torch_fused"}
    recipe = Recipe(
        tight.question.model, **recipe, attention="sdpa", ranks=ranks, sharding=sharding
    )
    assert fits(recipe.but(checkpointing="checkpointing" in words), 200 * MiB)
    fewer = recipe.but(checkpointing=True, ranks=ranks // 2)
    assert not any(fits(fewer.but(sharding=kind), 200 * MiB) for kind in SHARDINGS)


def test_a_shorter_sequence_is_a_remedy():
    asked = {"model": "gpt2-tiny", "effective_batch": 1, "ways": ("full",)}
    asked["precisions"] = ("fp16-amp",)
    search = Search(Question(seq_len=64, **asked), find_gpu("T4"), 0.05)
    short = search.nearest(search.recipes.combinations)
    card = int(1.06 * (short.needed - GPUS["T4"].context))
    answer = plan(gpu=card, seq_len=1024, **asked)
    assert not answer and any("tokens" in remedy for remedy in answer.remedies)


def test_segments_that_grow_are_asked_for_with_the_question():
    question = PLAIN | {"seq_len": 512, "effective_batch": 32}
    answer = plan("gpt2-tiny", "T4", expandable_segments=True, **question)
    option = answer.fastest
    assert option.recipe.expandable_segments
    assert option.needed == fits(option.recipe, "T4").needed
    plain = option.recipe.but(expandable_segments=False)
    assert option.needed != fits(plain, "T4").needed
    assert answer.as_dict()["question"]["expandable_segments"] is True
    with refused("expandable_segments is 'yes': allowed are True, False"):
        plan("gpt2-tiny", "T4", expandable_segments="yes")


def test_cards_without_the_format_asked_for_are_left_out():
    answer = plan("gpt2-tiny", ["T4", "L4"], precisions="bf16-amp", ways="full", **SMALL)
    assert list(answer.options) == ["L4"]


def test_the_first_line_names_the_first_tier_that_fits(roomy):
    assert roomy.decision[0] == "Full fine-tuning fits as it is."
    assert roomy.first == roomy.tiers[1]
    first, second, *_ = str(roomy).splitlines()
    assert first.startswith("gpt2-tiny on T4: full fine-tuning fits, 0.") and "of 14.6" in first
    assert second.startswith("Tier 1, and fastest: fp16-amp, adamw_torch_fused, micro-batch 4 x 1")
    for tier, option in roomy.tiers.items():
        assert option.tier == tier and f"{tier} {TIERS[tier]}" in flat(roomy)


@pytest.mark.parametrize(
    "part, changes, words",
    [
        ("parameters", {}, "QLoRA"),
        ("parameters", dict(lora_rank=8, base="nf4"), "a smaller model and a larger card"),
        ("gradients", dict(lora_rank=8), "QLoRA"),
        (
            "activations",
            dict(batch_size=2),
            "checkpointing, a smaller micro-batch and shorter sequences",
        ),
        ("activations", dict(checkpointing=True), "shorter sequences"),
        ("optimizer_states", dict(optimizer="adamw_8bit"), "LoRA and QLoRA"),
    ],
)
def test_no_advice_is_what_the_recipe_does_already(part, changes, words):
    recipe = Recipe("gpt2-tiny", **(dict(batch_size=1) | changes))
    assert remedies_of(Category(part), recipe) == words


def test_a_sequence_of_one_token_is_not_halved():
    """Nor is a micro-batch of one sequence; both are asked for."""
    answer = plan("gpt2-tiny", "T4", **PLAIN | {"seq_len": 1, "effective_batch": 1})
    names = {switch.name for switch in answer.switches}
    assert names and not any(name.endswith((" tokens", "micro-batch 2")) for name in names)


def test_switches_are_sorted_by_what_they_save(roomy):
    saved = [switch.saved for switch in roomy.switches]
    assert saved == sorted(saved, reverse=True)
    names = {switch.name for switch in roomy.switches}
    assert {"LoRA", "QLoRA", "checkpointing", "adamw_8bit", "micro-batch 2", "32 tokens"} <= names


def test_no_seconds_are_told_where_states_move():
    """Beside the bytes stands what they assume."""
    search = Search(Question("gpt2-tiny", ways=("full",), seq_len=64), find_gpu("T4"), 0.05)
    paged = Combination("full", "fp16-amp", "paged_adamw_8bit")
    option = search.answers.at_least(search.recipes.recipe(paged, 1))
    assert option.seconds is option.samples_per_second is None
    assert str(option).count("(all states paged out)") == 1 and "a step" not in str(option)
    plain = Combination("full", "fp16-amp", "adamw_8bit")
    assert search.answers.at_least(search.recipes.recipe(plain, 1)).seconds > 0


def test_quality_is_kept_unless_told_otherwise():
    question = Question("gpt2", ways=("full",))
    kept, excluded = combinations(question, find_gpu("L4"))
    free, none = combinations(dataclasses.replace(question, keep_quality=False), find_gpu("L4"))
    assert {"sgd", "lion_8bit"} == {one.optimizer for one in free} - {one.optimizer for one in kept}
    assert {"bf16"} == {one.precision for one in free} - {one.precision for one in kept}
    assert excluded and not none
    assert kept[0] == Combination("full", "bf16-amp", "adamw_torch_fused")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("gpu", ["L4", "T4"])
@pytest.mark.parametrize("task", ["causal-lm", "sequence-classification"])
def test_lora_and_qlora_differ_in_the_base_alone(gpu, task):
    """Bases of 16 and of 4 bits under autocast, no cast to fp32, and the same fp32 adapters."""
    card, question = find_gpu(gpu), Question("llama-3.2-1b-tiny", task=task, lora_rank=4)
    said = Recipes(question, card)
    first = {one.way: one for one in reversed(said.combinations)}
    lora, qlora = (said.recipe(first[way], 1) for way in ("lora", "qlora"))
    assert lora.precision == qlora.precision == ("bf16-amp" if gpu == "L4" else "fp16-amp")
    assert lora.base == "half"
    assert qlora == lora.but(base="nf4", double_quant=True, upcast=False)
    for recipe in (lora, qlora):
        weights = Training(recipe).model.named_parameters()
        assert {p.dtype for name, p in weights if "lora_" in name} == {torch.float32}
    assert simulate(qlora, card).peak_allocated < simulate(lora, card).peak_allocated


def test_several_cards_are_a_table():
    answer = plan("gpt2-tiny", ["V100", "t4", "10 MiB"], **PLAIN)
    assert list(answer.options) == ["10 MiB", "T4", "V100"]
    assert answer and answer.smallest == {"full": "T4"}
    assert answer.options["10 MiB"]["full"].missing
    assert json.loads(json.dumps(answer.as_dict()))["smallest"] == {"full": "T4"}
    first, table = str(answer).split("\n\n")
    table = [line.split() for line in table.splitlines()]
    assert "\nSmallest for full fine-tuning: T4, with " in first
    assert table[0] == ["card", "full", "fine-tuning"] and "lacks" in table[2]
    assert not plan("gpt2-tiny", ["10 MiB", "12 MiB"], **PLAIN)


def test_the_text_is_short(roomy):
    assert len(str(roomy).splitlines()) <= 45
    assert max(map(len, str(roomy).splitlines())) <= 80


@pytest.mark.slow
def test_a_rank_of_several_is_simulated():
    question = PLAIN | {"model": "gpt2-tiny", "ranks": 2}
    answer = plan(gpu=60 * MiB, **question)
    for option in distinct(answer.fastest, answer.roomiest, *answer.tiers.values()):
        recipe = option.recipe
        assert recipe.ranks == 2
        assert recipe.batch_size * recipe.accumulation * 2 == question["effective_batch"]
        simulate(recipe, 60 * MiB)
    for option in distinct(answer.fastest, answer.roomiest):
        more = [option.recipe.but(batch_size=option.largest_batch + n) for n in (0, 1)]
        assert [bool(fits(recipe, 60 * MiB)) for recipe in more] == [True, False]
    assert str(answer).startswith("gpt2-tiny on 2 x 60 MiB")
    assert any("QLoRA under zero2" in reason for reason in answer.excluded)


def test_what_is_looked_at_with_ranks():
    asked = {"ranks": 2, "effective_batch": 4}
    found, excluded = combinations(Question("llama-3.2-1b", **asked), find_gpu("L4"))
    assert {one.sharding for one in found if one.way == "qlora"} == {"ddp"}
    assert {one.sharding for one in found if one.way == "lora"} == set(SHARDINGS)
    found, excluded = combinations(Question("t5-3b", **asked), find_gpu("L4"))
    assert {one.sharding for one in found} == {"ddp"}
    assert any("two stacks of layers under zero2" in reason for reason in excluded)


def test_a_card_given_in_bytes_is_as_fast_as_an_a100():
    asked = PLAIN | {"model": "gpt2-tiny", "effective_batch": 1}
    like, given = (plan(gpu=gpu, **asked).fastest for gpu in ("A100-80GB", "80 GiB"))
    assert given.recipe == like.recipe and given.seconds == like.seconds


def test_the_loss_in_parts_is_tried_in_half_precision_before_fp32():
    answer = plan("qwen3-0.6b", "T4", seq_len=2048, ways="full")
    assert answer.tiers[1].recipe.loss == "chunked"
    assert answer.tiers[1].recipe.precision == "fp16-amp"
    assert "does not fit with all logits at once" in " ".join(str(answer).split())


@pytest.mark.slow
def test_growing_segments_are_a_remedy():
    answer = plan("phi-4", "T4", seq_len=2048)
    text = " ".join(str(answer).split())
    assert not answer and "segments that grow in place (--expandable-segments), with QLoRA" in text


def test_a_choice_that_is_much_slower_than_the_fastest_says_so():
    answer = plan("llama-3-8b", "A100-80GB", seq_len=2048, ways="full,lora")
    text = " ".join(str(answer).split())
    times = answer.first.seconds / answer.fastest.seconds
    assert answer.first.recipe.precision == "fp32" and f", {times:.2g} times as fast." in text
    assert "without TF32" in text and f"{answer.room / 2**30:,.1f} of the card's" in text


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_lines_have_the_width_of_a_terminal(ranks):
    answer = plan("qwen2.5-14b", "RTX-4090", seq_len=2048, ranks=ranks, ways="full,lora")
    assert not answer and max(map(len, str(answer).splitlines())) <= 80


@pytest.mark.slow
def test_a_slow_link_takes_time():
    question = PLAIN | {"model": "gpt2-tiny", "gpu": "A100-80GB", "ranks": 2, "effective_batch": 2}
    quick, slow = (plan(link=link, **question).fastest for link in ("nvlink", "ethernet-10"))
    assert slow.seconds > quick.seconds


@pytest.mark.slow
def test_a_model_that_peft_gives_no_adapters():
    asked = SMALL | {"effective_batch": 1, "precisions": "fp32"}
    answer = plan("distilbert-tiny", "T4", **asked)
    assert {option.way for option in answer.tiers.values()} == {"full"}
    assert any("all-linear': peft refuses it (" in reason for reason in answer.excluded)
    with refused("ways is .'lora',.: .*peft"):
        plan("distilbert-tiny", "T4", ways="lora", **SMALL)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gpu": []}, "gpu is []"),
        ({"margin": -1}, "margin is -1"),
        ({"effective_batch": 2.5}, "effective_batch is 2.5"),
        ({"ways": "half"}, "ways is 'half': allowed are full, lora, qlora"),
        ({"precisions": ("fp8",)}, "precisions is 'fp8'"),
        ({"precisions": "bf16"}, "no native bfloat16"),
        ({"effective_batch": 10**20}, "allowed are whole numbers from 1 to 131,072"),
        ({"ranks": 3}, "effective_batch is 16: allowed are multiples of ranks, which is 3"),
        ({"ranks": 2, "gpu": None}, "ranks is 2 and gpu names"),
    ],
)
def test_bad_input_is_one_line(changes, says):
    with refused(says):
        plan(**{"model": "gpt2-tiny", "gpu": "T4"} | changes)


def test_folders_that_are_no_model(tmp_path):
    with refused("there is no such file: name a config.json"):
        plan(str(tmp_path), "T4")
    (tmp_path / "adapter_config.json").write_text("{}")
    with refused("holds only an adapter: name the model"):
        plan(str(tmp_path), "T4")
    (tmp_path / "config.json").write_text('{"model_type": "gizmo"}')
    with refused("model_type is 'gizmo': .* a newer one may know it"):
        plan(str(tmp_path), "T4")


def test_a_simulation_runs_out_where_a_plan_ends():
    """Without the margin the border is near that of the simulation itself."""
    answer = plan("gpt2-tiny", 100 * MiB, margin=0, **PLAIN)
    largest = answer.fastest.recipe.but(batch_size=answer.fastest.largest_batch)
    simulate(largest, 100 * MiB)
    with pytest.raises(torch.OutOfMemoryError):
        simulate(largest.but(batch_size=largest.batch_size + 1), 100 * MiB)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("batches", [(1, 4), (4, 1), (2, 3)])
@pytest.mark.parametrize("changes", [{}, {"checkpointing": True}, {"lora_rank": 4, "base": "nf4"}])
def test_the_peak_of_a_trace_is_that_of_its_log(batches, changes):
    """Also of more micro-batches than the trace has, whose tokens are added."""
    batch, accumulation = batches
    recipe = Recipe("llama-3.2-1b-tiny", batch_size=batch, accumulation=accumulation, seq_len=64)
    recipe, card = recipe.but(precision="bf16-amp", max_grad_norm=1.0, **changes), find_gpu("L4")
    whole = peak_allocated(sized_log(recipe, card).events())
    assert peak_allocated_of(recipe, card) == whole


def test_the_loss_in_parts_where_logits_are_too_much():
    """What decides is what `fits` says of it."""
    question = {"ways": "lora", "precisions": "bf16-amp", "lora_rank": 4}
    question |= {"seq_len": 512, "effective_batch": 2}
    model = models.resized("gpt2-tiny", vocab_size=50_000)
    card = 250 * MiB
    answer = plan(model, card, **question)
    option = answer.first
    assert option.recipe.loss == "chunked" and fits(option.recipe, card)
    # No sizes were looked for with such a loss, and the text goes on without them.
    assert option.longest is None and max(map(len, str(answer).splitlines())) <= 80
    assert not fits(option.recipe.but(loss="whole", checkpointing=True), card)


def test_a_single_change_leaves_the_loss_in_parts():
    model, card = models.resized("llama-3-8b-tiny", vocab_size=50_000), 250 * MiB
    question = {"ways": ("lora", "qlora"), "precisions": "bf16-amp", "lora_rank": 4}
    answer = plan(model, card, seq_len=512, effective_batch=2, **question)
    recipe = answer.first.recipe
    assert recipe.loss == "chunked" and recipe.base == "half"
    (change,) = (one for one in answer.switches if one.name == "QLoRA")
    peaks = [peak_allocated_of(one, find_gpu(card)) for one in (recipe, recipe.but(**NF4))]
    assert change.saved == peaks[0] - peaks[1]


@pytest.mark.parametrize(("model", "way"), [("llama-3-8b", "full"), ("mixtral-8x7b", "qlora")])
def test_what_cannot_fit_is_not_traced(model, way, monkeypatch):
    """8 billion weights with their gradients and states are too many for 24 GB.

    So are the experts of a mixture, which bitsandbytes leaves in 16 bits.
    """
    search = Search(Question(model, 2048), find_gpu("RTX-4090"), 0.05)
    monkeypatch.setattr(search.answers, "tensors", None)
    candidates = [one for one in search.recipes.combinations if one.way == way]
    assert search.best_of(candidates) is None and min(search.lacks.values()) > 0
