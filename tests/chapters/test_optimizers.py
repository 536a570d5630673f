"""Chapter 7: what its cells show is true, and its optimizers are the ones that memlab runs."""

import gc

import bitsandbytes as bnb
import pytest
import torch
from notebook import Notebook

from memlab import Recipe, models
from memlab.evidence.records import find_records
from memlab.trace.tracer import Tracer
from memlab.training import LEARNING_RATE, Training

CHAPTER = Notebook("07-optimizers")
# Cells that need no simulation, in the order of the chapter.
TINY = """imports train-step ruled remembered sgd adam-printed adamw adam-steps lion adafactor fixed
    pairs ten-steps same-run zoo dynamic-map quantize dequantize compare-run compare-theirs outlier
    outlier-run
    adamw-8bit adamw-8bit-run dtypes corpus reader learn count-calls heaps calls-run small-tensors
    small-tensors-run trained-states step-error embedding-rows two-models leak leak-memory
    leak-mended late-run"""


@pytest.fixture(scope="module")
def chapter():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield CHAPTER.run(TINY, {"device": torch.device("cpu")})
    torch.set_num_threads(before)
    gc.unfreeze()  # the chapter freezes


def traced(training):
    torch.manual_seed(1)
    losses = [training.step(), training.step()]
    tracer = Tracer()
    tracer.watch(training.model, training.optimizer)
    with tracer:
        losses.append(training.step())
    return losses, tracer.footprint().peak_allocated, tracer.footprint().breakdown


@pytest.mark.parametrize(
    ("shown", "name"),
    [
        ("SGD, momentum", "sgd"),
        ("AdamW, loop", "adamw_torch_loop"),
        ("AdamW, foreach", "adamw_torch"),
        ("AdamW, fused", "adamw_torch_fused"),
        ("Adafactor", "adafactor"),
        ("8-bit Lion", "lion_8bit"),
        ("8-bit AdamW", "adamw_8bit"),
    ],
)
def test_the_shown_optimizer_and_the_recipes_agree(chapter, shown, name):
    # The embeddings are frozen, because the recipe keeps their states in 32 bit.
    recipe = Recipe("bert-large-tiny", batch_size=2, seq_len=32, freeze="embeddings")
    library = Training(recipe.but(optimizer=name))
    mine = Training(recipe)
    trained = [p for p in mine.model.parameters() if p.requires_grad]
    mine.optimizer = chapter["zoo"][shown](trained, lr=LEARNING_RATE)
    if shown == "SGD, momentum":  # on a CPU PyTorch would take the loop, on CUDA foreach
        mine.optimizer.param_groups[0]["foreach"] = True
    assert traced(mine) == traced(library)


def test_the_rules_from_scratch_are_the_libraries(chapter):
    apart = chapter["apart"]
    assert {"SGD", "momentum", "AdamW", "Lion", "Adafactor"} < set(apart)
    assert all(found < 1e-3 for name, found in apart.items() if name != "Adam as printed")
    assert apart["Adam as printed"] > 0.1


def test_the_printed_adam_steps_too_far_at_first_and_not_at_all_on_small_gradients(chapter):
    sizes, printed, torchs = (chapter[n] for n in ("step_sizes", "adam_as_printed", "adamw"))
    too_long = sizes(printed, 1.0, 1000)
    # The first step, by hand: (1 - beta1) / sqrt(1 - beta2) learning rates.
    assert too_long[0] == pytest.approx(0.1 / 0.001**0.5, rel=1e-4)
    assert max(too_long) > 6 and too_long[-1] > 1.2
    assert sizes(torchs, 1.0, 1000) == pytest.approx([1] * 1000, rel=1e-4)
    assert sizes(printed, 1e-6, 1)[0] < 0.01 < 0.9 < sizes(torchs, 1e-6, 1)[0]


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_the_librarys_and_takes_the_nearest_value(chapter, signed):
    table = chapter["dynamic_map"](signed)
    assert torch.equal(table, bnb.functional.create_dynamic_map(signed=signed))
    x = torch.randn(37, 101, generator=torch.Generator().manual_seed(0))
    x = x if signed else x.square()
    codes, scales = chapter["quantize"](x, table)
    assert codes.dtype == torch.uint8 and codes.shape == x.shape
    assert scales.shape == (-(-x.numel() // 256),)
    each = scales.repeat_interleave(256)[: x.numel()]
    nearest = (x.flatten() / each)[:, None].sub(table).abs().amin(1)
    found = (chapter["dequantize"](codes, scales, table).flatten() - x.flatten()).abs() / each
    assert torch.allclose(found, nearest, atol=1e-6)


def test_quantizing_zeros_gives_zeros(chapter):
    table, zeros = chapter["dynamic_map"](True), torch.zeros(300)
    assert torch.equal(chapter["dequantize"](*chapter["quantize"](zeros, table), table), zeros)


def test_bitsandbytes_on_a_cpu_is_never_far_from_the_nearest_value(chapter):
    state = chapter["state"]
    each = chapter["scales"].repeat_interleave(256)[: state.numel()].view_as(state)
    mine = chapter["dequantize"](chapter["codes"], chapter["scales"], chapter["table"])
    worse = ((chapter["back"] - state).abs() - (mine - state).abs()) / each
    assert -1e-6 < worse.min() and worse.max() < 1e-4


def test_one_outlier_spoils_a_tensor_but_only_its_own_block(chapter):
    calm, table = chapter["calm"], chapter["positive"]
    errors = []
    for block in (calm.numel(), 256):
        found = chapter["dequantize"](*chapter["quantize"](calm, table, block), table, block)
        errors.append(((found[1:] - calm[1:]).norm() / calm[1:].norm()).item())
    assert errors[1] < 0.01 < 3 * errors[1] < errors[0]


def test_only_the_states_are_in_8_bits(chapter):
    kinds = chapter["kinds"]
    assert kinds["weight"] == kinds["gradient"] == torch.float32
    assert kinds["state1"] == kinds["state2"] == torch.uint8


def test_8_bit_adamw_from_scratch_stays_beside_adamw(chapter):
    gaps = chapter["gaps"]
    assert set(gaps) == {"ours", "bitsandbytes'"} and all(0 < gap < 0.1 for gap in gaps.values())


def test_8_bit_adamw_learns_as_adamw_and_sgd_does_not(chapter):
    learn, ends = chapter["learn"], {}
    rates = {"AdamW": 1e-2, "8-bit AdamW": 1e-2, "SGD": 1.0}
    makers = chapter["zoo"] | {"AdamW": chapter["zoo"]["AdamW, fused"]}
    makers["8-bit AdamW"] = chapter["bnb_adamw_8bit"]
    for name, rate in rates.items():
        runs = [learn(makers[name], rate, seed) for seed in range(3)]
        ends[name] = [sum(losses[-10:]) / 10 for losses in runs]
    spread = max(ends["AdamW"]) - min(ends["AdamW"])
    for one, other in zip(ends["AdamW"], ends["8-bit AdamW"], strict=True):
        assert abs(one - other) < spread / 2
    assert max(ends["AdamW"]) < min(ends["SGD"])


def test_adafactor_with_its_own_rates_is_behind_and_with_a_tuned_one_is_not(chapter):
    own = CHAPTER.run("adafactor-own-run", dict(chapter, seeds=(0,)))["slow_ends"][0]
    end = {
        name: sum(chapter["learn"](chapter["zoo"][name], 1e-2, 0)[-10:]) / 10
        for name in ("Adafactor", "AdamW, fused")
    }
    assert end["Adafactor"] < end["AdamW, fused"] < own - 0.1


def test_multi_tensor_steps_need_few_calls(chapter):
    calls = chapter["calls"]
    assert calls["fused"] <= calls["foreach"] <= 20 and calls["loop"] >= 400


def test_small_tensors_stay_in_32_bit_until_told(chapter):
    assert chapter["too_small"] == pytest.approx(8)
    assert chapter["told"] < 2.5


def test_rows_of_an_embedding_differ_more_and_blocks_fix_most_of_it(chapter):
    embedding, linear = (chapter["embedding_rows"][n] for n in ("embedding", "linear"))
    assert embedding["spread of the rows"] > 5 * linear["spread of the rows"]
    assert embedding["per cent off, one scale"] > 2 * embedding["per cent off, blocks"]


def test_an_override_leaks_into_the_next_optimizer_and_is_fixed(chapter):
    assert chapter["asked"] == chapter["leaked"] == [32, 8]
    assert chapter["fixed"] == [8, 8]
    assert chapter["kept"] and chapter["freed"]
    assert chapter["too_late"] == torch.uint8


def test_the_paged_optimizer_says_that_it_does_not_page_on_a_cpu(chapter):
    ran = CHAPTER.run("cpu-kinds", chapter)
    assert any("not supported on CPU" in str(w.message) for w in ran["caught"])
    assert ran["ran"]["AdamW8bit"] == pytest.approx(2, abs=0.1)
    assert ran["ran"]["Lion8bit"] == pytest.approx(1, abs=0.1)


def test_full_size_bytes_a_weight_and_what_the_step_borrows(chapter):
    CHAPTER.run("step-alone", chapter)
    count = 124_439_808  # GPT-2, tied
    found = {}
    for name in ("AdamW, foreach", "AdamW, fused", "8-bit AdamW", "Adafactor"):
        run = chapter["step_alone"](chapter["zoo"][name])
        found[name] = [run.breakdown[c] / count for c in ("optimizer_states", "temporary")]
    assert found["AdamW, foreach"] == pytest.approx([8, 4], abs=0.01)
    assert found["AdamW, fused"] == pytest.approx([8, 0], abs=0.01)
    assert found["8-bit AdamW"] == pytest.approx([2 + 8 / 256, 0], abs=0.02)
    assert found["Adafactor"][0] < 0.05 < 1 < found["Adafactor"][1]


def test_the_published_table_leaves_adafactor_no_four_bytes():
    used = {run.name: run.figures["device_used_bytes"] for run in find_records(device="V100")}
    with torch.device("meta"):
        count = sum(p.numel() for p in models.build("bert-large").parameters())
    saved = [(used["vanilla"] - used[name]) / count for name in ("adafactor", "8-bit adam")]
    assert 7.5 < saved[0] < 8.5  # of AdamW's 8
    assert 5 < saved[1] < 6.1


@pytest.mark.parametrize("number, wrong", [(1, 6), (2, 1000), (3, 0.989)])
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(chapter, capsys, number, wrong):
    before = {1: "held", 2: "held", 3: "buggy"}[number]
    CHAPTER.run(f"{before} exercise-{number}", chapter)
    assert "Not answered yet" in capsys.readouterr().out
    CHAPTER.run(f"solution-{number}", chapter)  # asserts that its own check passes
    source = CHAPTER.code[f"exercise-{number}"].replace("answer = ...", f"answer = {wrong!r}")
    exec(source, chapter)
    assert "Not yet" in capsys.readouterr().out
