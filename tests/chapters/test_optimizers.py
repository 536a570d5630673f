"""Chapter 7: its optimizers are the ones that memlab runs, its codes the library's."""

import gc

import bitsandbytes as bnb
import pytest
import torch
from notebook import Notebook, assert_steps_agree, cells_of

from memlab import Recipe, models
from memlab.workloads.optimizers import LEARNING_RATE
from memlab.workloads.training import Training

CELLS = "imports setup zoo muon zoo-first dynamic-map quantize dequantize in-backward five-steps"


@pytest.fixture(scope="module")
def chapter():
    yield Notebook("07-optimizers").run(CELLS)
    gc.unfreeze()  # the chapter freezes


deeper = cells_of("07-optimizers-deeper", "imports settings rules galore four pack unpack lion")


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
    assert_steps_agree(mine, mine.step, library)


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


def test_stepping_in_backward_trains_alike_and_holds_no_gradient_for_long(chapter):
    one_by_one = chapter["adamw_with"](foreach=False)

    def hooked(params, lr):
        return chapter["InBackward"](params, lr, one_by_one)

    after = chapter["weights_after"]
    assert torch.equal(after(one_by_one), after(hooked))
    held, model = [], models.build("llama-3.2-1b-tiny")
    hooked(model.parameters(), 1e-3)
    weights = list(model.parameters())
    for p in weights:
        p.register_hook(lambda grad: held.append(sum(w.grad is not None for w in weights)))
    ids = torch.ones(1, 8, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    assert held == [0] * len(weights) and all(w.grad is None for w in weights)


def test_muon_and_adamw_share_the_weights(chapter):
    model, ids = models.build("gpt2-tiny"), torch.ones(1, 8, dtype=torch.long)
    optimizer = chapter["muon"](model.named_parameters(), 1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    for old, new in zip(before, model.parameters(), strict=True):
        assert new.grad is None and not torch.equal(old, new)


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_the_librarys_and_takes_the_nearest_value(chapter, signed):
    table = chapter["dynamic_map"](signed)
    assert torch.equal(table, bnb.functional.create_dynamic_map(signed=signed))
    x = torch.randn(5, 101) if signed else torch.randn(5, 101).square()
    x[0] = 0
    codes, scales = chapter["quantize"](x, table)
    assert codes.dtype == torch.uint8 and scales.shape == (2,)
    back = chapter["dequantize"](codes, scales, table)
    each = scales.repeat_interleave(256)[: x.numel()].view_as(x)
    nearest = (x / each)[..., None].sub(table).abs().amin(-1)
    assert torch.allclose((back - x).abs() / each, nearest, atol=1e-6) and (back[0] == 0).all()


@pytest.mark.parametrize("name", ["v", "G"])
def test_4_bits_are_packed_two_to_a_byte_and_of_second_moments_none_becomes_zero(deeper, name):
    x, table = torch.rand(64, 256).square(), deeper["TABLES"][name]
    packed, scales = deeper["pack"](x, table)
    assert packed.nbytes + scales.nbytes == x.numel() * (1 / 2 + 4 / 128)
    back, rows = deeper["unpack"](packed, scales, table) / scales, x.view(-1, 128) / scales
    nearest = rows[..., None].sub(table).abs().amin(-1)
    assert torch.allclose((back - rows).abs(), nearest, atol=1e-6)
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
