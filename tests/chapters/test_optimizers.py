"""Chapter 7: its optimizers are the ones that memlab runs, its codes the library's."""

import gc
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from notebook import Notebook

from memlab import Recipe, models
from memlab.trace.tracer import Tracer
from memlab.workloads.optimizers import LEARNING_RATE
from memlab.workloads.training import Training

CHAPTER, DEEPER = Notebook("07-optimizers"), Notebook("07-optimizers-deeper")
TINY = (
    "imports setup zoo muon zoo-first dynamic-map quantize dequantize in-backward five-steps learn "
    "best-rate"
)


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
    yield DEEPER.run("imports settings rules galore four pack unpack lion")
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


def test_lion_from_scratch_is_the_librarys(deeper):
    torch.manual_seed(0)
    mine, state = torch.randn(8, 8), {}
    theirs = torch.nn.Parameter(mine.clone())
    optimizer = bnb.optim.Lion([theirs], lr=1e-3)
    for _ in range(5):
        theirs.grad = torch.randn(8, 8)
        deeper["lion"](mine, theirs.grad, state, 1e-3)
        optimizer.step()
    assert torch.allclose(mine, theirs.detach(), atol=1e-7)


def test_stepping_in_backward_trains_alike_and_holds_one_gradient_at_a_time(chapter):
    one_by_one = chapter["adamw_with"](foreach=False)

    def hooked(params, lr):
        return chapter["InBackward"](params, lr, one_by_one)

    after = chapter["weights_after"]
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


def test_the_search_for_a_rate_ends_inside_its_grid(chapter, monkeypatch):
    def ends(make, lr, seed):
        return [abs(torch.tensor(lr).log10() + 1.5).item()] * 10

    monkeypatch.setitem(chapter["best_rate"].__globals__, "learn", ends)
    assert chapter["best_rate"](None, -4) == pytest.approx(10**-1.5)
    assert chapter["best_rate"](None, -1) == pytest.approx(10**-1.5)
    assert chapter["end_of"]([float("nan")] * 10) == float("inf")


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


def test_layerwise_forms_refuse_accumulation():
    from transformers import trainer_optimizer

    refusal = "does not support gradient accumulation"
    assert refusal in Path(trainer_optimizer.__file__).read_text("utf-8")
