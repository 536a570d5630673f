"""Chapter 7: what its cells show is true, and its optimizers are the ones that memlab runs."""

import gc
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from notebook import Notebook

from memlab import Recipe, formula, models, simulate
from memlab.book.chapters import optimizers, optimizers_deeper
from memlab.book.chapters.optimizers_deeper import Rules
from memlab.trace.tracer import Tracer
from memlab.workloads.optimizers import LEARNING_RATE
from memlab.workloads.training import Training

CHAPTER, DEEPER = Notebook("07-optimizers"), Notebook("07-optimizers-deeper")
# Cells that need no simulation, in the order of the chapter.
TINY = """imports zoo zoo-first ruled remembered sgd adamw same-run dynamic-map quantize
    dequantize outlier-run adamw-8bit adamw-8bit-distance adamw-8bit-run in-backward
    small-tensors-run adam-printed"""


def bnb_adamw_8bit(params, lr):
    return bnb.optim.AdamW8bit(params, lr, weight_decay=0.01)


@pytest.fixture(scope="module")
def chapter():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield CHAPTER.run(TINY)
    torch.set_num_threads(before)
    gc.unfreeze()  # the chapter freezes


@pytest.fixture(scope="module")
def deeper():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield DEEPER.run("imports rules galore mini four pack unpack four-rule")
    torch.set_num_threads(before)
    gc.unfreeze()


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
    assert set(chapter["apart"]) == {"momentum", "AdamW"}
    assert all(found < 1e-3 for found in chapter["apart"].values())


def test_lion_from_scratch_is_the_librarys(deeper):
    DEEPER.run("lion", deeper)
    ends = []
    for make in (
        lambda p: Rules([("w", p)], 1e-3, deeper["lion"], deeper["lion"]),
        lambda p: bnb.optim.Lion([p], lr=1e-3),
    ):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(8, 8))
        optimizer = make(weight)
        for _ in range(5):
            weight.grad = torch.randn(8, 8)
            optimizer.step()
        ends.append(weight.detach())
    assert torch.allclose(*ends, atol=1e-7)


def test_the_printed_adam_steps_too_far_at_first_and_not_at_all_on_small_gradients(chapter):
    first, printed, torchs = (chapter[n] for n in ("first_step", "adam_as_printed", "adamw"))
    # By hand: (1 - beta1) / sqrt(1 - beta2) learning rates.
    assert first(printed, 1.0) == pytest.approx(0.1 / 0.001**0.5, rel=1e-4)
    assert first(torchs, 1.0) == pytest.approx(1, rel=1e-4)
    assert first(printed, 1e-6) < 0.01 < 0.9 < first(torchs, 1e-6)


def test_stepping_in_backward_trains_alike_and_holds_one_gradient_at_a_time(chapter):
    one_by_one = chapter["adamw_with"](foreach=False)

    def hooked(params, lr):
        return chapter["InBackward"](params, lr, one_by_one)

    after = optimizers.weights_after
    assert torch.equal(after(one_by_one), after(hooked))
    seen = []
    model = models.build("llama-3.2-1b-tiny")
    chapter["InBackward"](model.parameters(), 1e-3, one_by_one)
    weights = list(model.parameters())
    for p in weights:
        p.register_hook(lambda grad: seen.append(sum(w.grad is not None for w in weights)))
    ids = torch.ones(1, 8, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    assert len(seen) == len(weights) and max(seen) == 0
    assert all(w.grad is None for w in weights)


def test_muon_takes_the_inner_matrices_and_adamw_the_rest(chapter):
    model = models.build("gpt2-tiny")
    ids = torch.ones(1, 8, dtype=torch.long)
    optimizer = chapter["muon"](model.named_parameters(), 1e-3)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert all(not torch.equal(before[n], p) for n, p in model.named_parameters() if "ln_f" in n)
    layer = model.transformer.h[0].mlp.c_fc.weight
    assert not torch.equal(before["transformer.h.0.mlp.c_fc.weight"], layer)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_what_newer_optimizers_hold_is_the_arithmetic():
    newer = optimizers.newer_states()
    each, outer = newer["bytes a weight"], newer.attrs["outer"]
    held = formula(Recipe("llama-3.2-1b", seq_len=256, attention="sdpa"))
    states = held.breakdown["optimizer_states"] / 2**30
    assert newer["GiB"]["AdamW, schedule-free AdamW"] == pytest.approx(states, rel=1e-3)
    assert each["Muon"] == pytest.approx(8 - 4 * (1 - outer))
    assert each["4-bit AdamW"] == pytest.approx(1.0625)
    assert each["APOLLO-Mini"] < each["APOLLO, rank 512"] < each["GaLore, rank 512"]
    assert each["GaLore, rank 512"] < each["Adam-mini"]


def test_the_search_for_a_rate_ends_inside_its_grid(monkeypatch):
    def ends(make, lr, seed):
        return [abs(torch.tensor(lr).log10() + 1.5).item()] * 10

    monkeypatch.setattr(optimizers, "learn", ends)
    assert optimizers.best_rate(None, -4) == pytest.approx(10**-1.5)
    assert optimizers.best_rate(None, -1) == pytest.approx(10**-1.5)
    assert optimizers.end_of([float("nan")] * 10) == float("inf")


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


def test_bitsandbytes_on_a_cpu_is_never_far_from_the_nearest_value(deeper):
    DEEPER.run("nearest", deeper)
    assert 0 < deeper["other"] < 0.01 and 0 < deeper["worse"] < 1e-4


def test_4_bits_are_packed_two_to_a_byte_and_no_second_moment_becomes_zero(deeper):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).square()
    for name, table in deeper["TABLES"].items():
        assert len(table) == 16 and torch.equal(table, table.sort().values)
        packed, scales = deeper["pack"](x, table)
        assert packed.nbytes + scales.nbytes == pytest.approx(x.numel() * (1 / 2 + 4 / 128))
        back = deeper["unpack"](packed, scales, table)
        nearest = (x.view(-1, 128) / scales)[..., None].sub(table).abs().amin(-1)
        assert torch.allclose((back / scales - x.view(-1, 128) / scales).abs(), nearest, atol=1e-6)
        assert (back.min() > 0) == (name == "G")


def test_galore_moves_a_weight_within_its_directions_only(deeper):
    torch.manual_seed(0)
    g = torch.randn(32, 8) @ torch.randn(8, 64)
    p, state = torch.zeros(32, 64), {}
    deeper["galore"](p, g, state, 1e-2, rank=4)
    P = state["directions"]
    assert P.shape == (32, 4) and torch.linalg.matrix_rank(p) <= 4
    assert torch.allclose(P @ (P.T @ p), p, atol=1e-6)
    assert (p * g).sum() < 0  # downhill


def test_the_newer_rules_train_and_remember_what_the_arithmetic_says(deeper, monkeypatch):
    monkeypatch.setattr(optimizers_deeper, "best_rate", lambda make, start: 1e-2)
    monkeypatch.setattr(optimizers_deeper, "learn", lambda make, lr, seed: [float(seed)] * 10)
    rules = ("adamw", "galore", "adam_mini", "adamw_4bit")
    frame = optimizers_deeper.compared({r: deeper[r] for r in rules}, deeper["adamw"], seeds=2)
    held = frame["bytes"]
    assert held["adamw"] == 8 and held["adamw_4bit"] == pytest.approx(2 * (1 / 2 + 4 / 128))
    assert 4 < held["adam_mini"] < 4.1 and (frame["seed 1"] == 1).all()


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
    library = optimizers.weights_after(bnb_adamw_8bit)
    gap = optimizers.apart(library, chapter["full"])
    assert 0 < chapter["gap_ours"] < 0.1 and 0 < gap < 0.1


@pytest.mark.slow
def test_8_bit_adamw_learns_as_adamw_and_sgd_does_not(chapter):
    learn, ends = optimizers.learn, {}
    rates = {"AdamW": 1e-2, "8-bit AdamW": 1e-2, "SGD": 1.0}
    makers = chapter["zoo"] | {"AdamW": chapter["zoo"]["AdamW, fused"]}
    makers["8-bit AdamW"] = bnb_adamw_8bit
    for name, rate in rates.items():
        runs = [learn(makers[name], rate, seed) for seed in range(3)]
        ends[name] = [sum(losses[-10:]) / 10 for losses in runs]
    spread = max(ends["AdamW"]) - min(ends["AdamW"])
    for one, other in zip(ends["AdamW"], ends["8-bit AdamW"], strict=True):
        assert abs(one - other) < spread / 2
    assert max(ends["AdamW"]) < min(ends["SGD"])


def test_adafactor_with_its_own_rates_is_behind_and_with_a_tuned_one_is_not(chapter):
    ways = (chapter["zoo"][name] for name in ("Adafactor", "AdamW, fused"))
    tuned, adamw, own = (
        optimizers.end_of(optimizers.learn(make, lr, 0))
        for make, lr in zip((*ways, chapter["Adafactor"]), (1e-2, 1e-2, None), strict=True)
    )
    assert tuned < adamw < own - 0.1


def test_small_tensors_stay_in_32_bit_until_told(chapter):
    assert chapter["too_small"] == pytest.approx(8)
    assert chapter["told"] < 2.5


def test_an_override_leaks_into_the_next_optimizer_and_is_fixed(deeper):
    DEEPER.run("leak leak-fixed leak-gone late-run", deeper)
    assert deeper["asked"] == deeper["leaked"] == [32, 8]
    assert deeper["fixed"] == [8, 8]
    assert deeper["kept"] and deeper["freed"]
    assert deeper["too_late"] == torch.uint8


def test_full_size_bytes_a_weight_and_what_the_step_borrows(chapter):
    names = CHAPTER.run("step-alone", chapter | {"roomy": "T4"})
    count = 124_439_808  # GPT-2, tied
    found = {}
    for name in ("AdamW, foreach", "AdamW, fused", "8-bit AdamW", "Adafactor"):
        run = names["step_alone"](names["zoo"][name])
        found[name] = [run.breakdown[c] / count for c in ("optimizer_states", "temporary")]
    assert found["AdamW, foreach"] == pytest.approx([8, 4], abs=0.01)
    assert found["AdamW, fused"] == pytest.approx([8, 0], abs=0.01)
    assert found["8-bit AdamW"] == pytest.approx([2 + 8 / 256, 0], abs=0.02)
    assert found["Adafactor"][0] < 0.05 < 1 < found["Adafactor"][1]


def test_lighter_states_lower_a_peak_of_activations_and_a_lighter_step_does_not():
    recipe = Recipe("bert-large", batch_size=4, attention="sdpa", optimizer="adamw_torch_fused")
    fused, foreach, light = (
        simulate(recipe.but(optimizer=name))
        for name in ("adamw_torch_fused", "adamw_torch", "adamw_8bit")
    )
    runs = fused, foreach, light
    assert {run.peak_phase for run in runs} == {"backward"}
    assert len({run.breakdown["activations"] for run in runs}) == 1
    assert fused.breakdown["activations"] == max(fused.breakdown.values())
    with torch.device("meta"):
        count = len(list(models.build("bert-large").parameters()))
    counters = 512 * count  # of steps, which fused has on the card
    assert fused.peak_allocated - foreach.peak_allocated == counters
    states = [run.breakdown["optimizer_states"] for run in (fused, light)]
    saved = fused.peak_allocated - light.peak_allocated
    assert saved == pytest.approx(states[0] - states[1], rel=0.01) and saved > 0


@pytest.mark.parametrize("number, wrong", [(1, 6), (2, 1.0), (3, 0.989)])
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(chapter, capsys, number, wrong):
    before = {1: "held", 2: "", 3: "buggy"}[number]
    CHAPTER.run(f"{before} exercise-{number}", chapter)
    assert "Not answered yet" in capsys.readouterr().out
    CHAPTER.run(f"solution-{number}", chapter)  # asserts that its own check passes
    source = CHAPTER.code[f"exercise-{number}"].replace("answer = ...", f"answer = {wrong!r}")
    exec(source, chapter)
    assert "Not yet" in capsys.readouterr().out


def test_layerwise_forms_refuse_accumulation():
    from transformers import trainer_optimizer

    refusal = "does not support gradient accumulation"
    assert refusal in Path(trainer_optimizer.__file__).read_text("utf-8")
