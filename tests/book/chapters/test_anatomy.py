"""What the chapter on anatomy shows: known bytes at known moments, and pictures of them."""

import pytest
import torch

from memlab import Recipe, SimulatedGPU, models, simulate
from memlab.book.chapters import anatomy, operations
from memlab.units import MiB

TINY = Recipe("bert-large-tiny", batch_size=1, seq_len=16, optimizer="adamw_torch_fused")


def labels(figure):
    return {text.get_text() for ax in figure.axes for text in ax.texts}


def test_a_step_is_drawn_with_its_peak_and_its_phases():
    run = simulate(TINY)
    figure = anatomy.steps_figure({"one": run, "two": run})
    assert {f"{run.peak_allocated / 2**30:.1f}", "forward", "backward", "step"} <= labels(figure)


def test_bytes_at_rest_are_those_of_the_dtypes():
    frame = anatomy.at_rest(Recipe("bert-large"), torch.device("cpu"), ("bf16-amp", "bf16"))
    assert frame.loc["bf16-amp"].tolist() == [16, 4, 4, 8]
    assert frame.loc["bf16"].tolist() == [8, 2, 2, 4]


def test_a_bare_step_holds_the_textbooks_bytes_a_parameter():
    ways = anatomy.DRAWN + anatomy.UNDRAWN
    runs = anatomy.bare_steps(Recipe(models.with_layers("bert-large", 3)), ways)
    top = {label: anatomy.bytes_a_parameter(run).max() for label, run in runs.items()}
    assert top["pure bf16, fused"] == pytest.approx(8, abs=0.1)
    assert top["autocast, fused"] == pytest.approx(16, abs=0.1)
    assert top["fp32, multi-tensor"] == pytest.approx(20, abs=0.1)
    assert top["pure bf16, multi-tensor"] == pytest.approx(10, abs=0.1)
    assert 17 < top["autocast, fused, gradients kept"] < 18
    assert "pure bf16, fused: 8.0" in labels(anatomy.bytes_figure(runs))


def test_a_frozen_model_keeps_no_copies_under_autocast():
    loose, frozen = anatomy.inference_bytes(False), anatomy.inference_bytes(True)
    assert frozen == pytest.approx(4, abs=0.1) and 5.5 < loose < 6


def test_one_layer_keeps_what_its_backward_formulas_need():
    table = anatomy.kept_by_bert_layer(batch=1, length=512).set_index("shape")
    squares = table.index.str.contains("512, 512]", regex=False)
    kept = table["bytes / sbh"]
    assert kept[~squares].sum() == pytest.approx(34, abs=0.05)
    assert kept[squares].sum() == pytest.approx(5 * 16 * 512 / 1024, abs=0.01)


@pytest.mark.parametrize(
    "model, precision, attention, expected",
    [
        ("bert-large", "bf16", "eager", (34, 5)),  # Korthikanti and others, section 4.1
        ("bert-large", "fp32", "eager", (66, 9)),
        ("gpt2", "bf16", "sdpa", (58, 0)),
    ],
)
def test_coefficients_of_a_layer(model, precision, attention, expected):
    found = anatomy.coefficients(model, precision, attention)
    assert found == pytest.approx(expected, abs=0.1)


def test_only_eager_attention_bends_over_the_length(monkeypatch):
    grid = {"layers": (4, 8), "sequence": (2048, 4096)}
    monkeypatch.setattr(anatomy, "GRID", grid)
    powers = anatomy.growth()
    bent = [key for key, power in powers.items() if abs(power - 1) > 0.1]
    assert bent == [("eager", "sequence")] and 1.1 < powers["eager", "sequence"] < 2


def test_a_loss_without_gradients_of_its_own_takes_what_it_makes():
    def half(hidden, head, labels):
        return hidden.sum() + head.sum()

    assert anatomy.loss_peak(half, tokens=1024, vocabulary=2048, width=512) >= 3072 * 512 * 2


def test_a_segment_is_drawn_with_its_hole():
    with SimulatedGPU(2**30) as gpu:
        scratch = torch.empty(64 * MiB, dtype=torch.uint8, device="cuda")
        del scratch
        result = torch.empty(36 * MiB, dtype=torch.uint8, device="cuda")
        segments = gpu.snapshot()["segments"]
        del result
    bars = anatomy.segments_figure(segments).axes[0].patches
    assert [bar.get_width() for bar in bars] == [36, 28]
    assert bars[0].get_facecolor()[3] == 1 and bars[1].get_facecolor()[3] == 0


def test_results_that_come_first_leave_room_for_the_scratch():
    assert anatomy.results_first(24) == pytest.approx(1 - 24 * 36 / 1024)
    with pytest.raises(torch.OutOfMemoryError):
        anatomy.results_first(27)


def test_each_rule_of_thumb_misses():
    frame = anatomy.rules_of_thumb(simulate(TINY))
    once = 16 * simulate(Recipe("gpt2")).parameters / MiB
    assert frame.loc["16 x parameters", "rule"] == frame.loc["tied twice", "truth"] == once
    assert frame.loc["16 x parameters", "truth"] > 2 * once
    assert frame.loc["tied twice", "rule"] > 1.2 * once
    assert frame.loc["GB for GiB", "rule"] > frame.loc["GB for GiB", "truth"]


def test_what_waits_is_layers_what_the_loss_keeps_and_little_more():
    config = models.config("gpt2-xl")
    log_softmax = 32 * 1024 * config.vocab_size * 4 / operations.GB
    for switch in (False, True):
        recipe = Recipe("gpt2-xl", **operations.SHAPE, checkpointing=switch)
        layers = config.num_hidden_layers * operations.one_layer(config, checkpointing=switch)
        beside = operations.waiting(recipe) / operations.GB - layers - log_softmax
        assert 0 < beside < 0.5


def test_whole_models_stand_at_their_size():
    frame = operations.whole_models({"small": models.config("gpt2")})
    assert frame.loc["small", "parameters"] == 124_439_808
    assert frame.loc["small", "16 bytes each"] == pytest.approx(1.991, abs=0.001)
    assert frame.loc["small", "checkpoints"] < frame.loc["small", "layers"] / 10
    assert operations.parameters(operations.gpt_of_100_billion()) == pytest.approx(101e9, rel=0.01)


def test_contractions_compute_and_the_others_move_bytes():
    recipe = Recipe("bert-large-tiny", batch_size=1, seq_len=64, attention="eager")
    table = operations.intensities(recipe, torch.device("cpu"))
    assert table.index[0] == "tensor contractions"
    for share in ("FLOPs, %", "bytes, %", "time, %"):
        assert table[share].sum() == pytest.approx(100)
    forward, backward = operations.flops(recipe, torch.device("cpu"))
    assert table.index.size == 3 and backward == pytest.approx(2 * forward, rel=0.05)


def test_a_flat_buffer_has_four_bytes_a_parameter_and_clipping_none():
    buffer, clipping = operations.gradients_at_once()
    assert buffer == pytest.approx(4 * 1_557_611_200, rel=1e-3) and clipping < MiB
