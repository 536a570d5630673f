"""Chapter 18: what it prints of inference is so, a zero saves nothing, each trap is one."""

import importlib.util

import pytest
import torch
from notebook import Notebook

from memlab.spec.serving import kv_cache_bytes

CHAPTER = Notebook("18-deploying")
PRUNING = "patients patients-run prune-masks prune-fours prune-shapes prune-heads prune-run"
here = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("onnx", "onnxscript", "onnxruntime"))),
    reason="onnx, onnxscript and onnxruntime are optional",
)


@pytest.fixture(scope="module")
def chapter():
    return CHAPTER.run("imports first situation-facts")


@pytest.fixture(scope="module")
def patients(chapter):
    CHAPTER.run(PRUNING, chapter)
    assert max(chapter["base"]) < 5  # 6.24 is a guess
    return chapter


@pytest.mark.slow
def test_an_8b_does_not_fit_a_t4_in_fp16_and_does_in_nf4(chapter):
    assert chapter["nf4"].peak_reserved < chapter["find_gpu"]("T4").usable
    assert chapter["nf4"].prefill["weights"] < chapter["served"].prefill["weights"] / 2


def test_a_weight_in_nf4_takes_what_the_page_says(chapter):
    """Half a byte in the layers, and two in the embedding and the output layer."""
    config = chapter["models"].config("llama-3-8b")
    outer = 2 * config.vocab_size * config.hidden_size
    with torch.device("meta"):
        weights = chapter["models"].build("llama-3-8b").num_parameters()
    held = chapter["nf4"].prefill["weights"]
    assert (held - 2 * outer) / (weights - outer) == pytest.approx(0.5, abs=0.04)
    text = CHAPTER.text["situation"]
    assert f"2 bytes a weight in fp16, {held / weights:.1f} in" in text


def test_a_token_of_llama_3_takes_a_quarter_of_one_of_llama_2(chapter):
    rows = CHAPTER.run("per-token", chapter)["rows"]
    assert rows["llama-2-7b"][0] == 4 * rows["llama-3-8b"][0]
    assert "a token costs a quarter" in CHAPTER.text["per-token-words"]


def test_published_and_live_figures_stand_beside_simulated_ones(chapter):
    CHAPTER.run(
        "published published-facts process speed measure-run measure-table measure-facts", chapter
    )
    assert len(chapter["published"]) == 4
    assert set(chapter["compared"].index.get_level_values("model")) == set(chapter["twins"])


def test_the_shown_loop_writes_what_generate_writes(chapter):
    CHAPTER.run("loop-code loop-same", chapter)
    assert torch.equal(chapter["ours"], chapter["theirs"])
    assert chapter["ours"].shape == (1, 40)


def test_logits_of_a_whole_prompt_raise_the_peak(chapter):
    CHAPTER.run("logits-run", chapter)
    assert chapter["whole"].prefill["logits"] == 4096 * 128_256 * 2


@pytest.mark.slow
def test_a_window_lowers_the_cache_and_not_the_prefill(chapter):
    CHAPTER.run("caches-run caches-table caches-facts", chapter)
    full = kv_cache_bytes(chapter["full"], 4096 + 63, 8)
    assert chapter["at_end"]["dynamic"] == full
    window = kv_cache_bytes(chapter["window"], 4096 + 63, 8)
    assert chapter["at_end"]["sliding"] == pytest.approx(window, abs=1024)


def test_blocks_hold_more_texts_than_reservations(chapter):
    CHAPTER.run("paged-run", chapter)
    assert "Four hundred requests of random lengths up to 4,096" in CHAPTER.text["paged"]
    assert len(chapter["lengths"]) == 400 and chapter["longest"] == 4096
    assert chapter["lengths"].max() > 4000  # drawn up to what is reserved
    lengths, fits = chapter["lengths"], chapter["fits"]
    held = lengths[:fits].sum().item() * chapter["token"]
    assert held <= chapter["room"] < lengths[: fits + 1].sum().item() * chapter["token"] * 1.02


@pytest.mark.slow
def test_a_mask_keeps_the_share_and_a_cut_keeps_the_function(patients):
    for way, share in (("smallest", 0.2), ("two_of_four", 0.5)):
        model = patients["copy"].deepcopy(patients["patients"][0])
        patients[way](model)
        for layer in patients["linears"](model):
            kept = layer.weight_mask.mean().item()
            assert kept == pytest.approx(share, abs=1e-3)
            if way == "two_of_four":
                assert (layer.weight_mask.reshape(-1, 4).sum(1) == 2).all()
    # Neurons that are zero can be cut without a change.
    model = patients["copy"].deepcopy(patients["patients"][0])
    for block in model.model.layers:
        block.mlp.down_proj.weight.data[:, ::2] = 0
    before = patients["loss_on"](model)
    patients["narrow"](model)
    assert patients["loss_on"](model) == pytest.approx(before, abs=1e-5)
    for block in model.model.layers:
        block.self_attn.o_proj.weight.data.reshape(128, 4, 32)[:, 1::2] = 0
    before = patients["loss_on"](model)
    patients["fewer_heads"](model)
    assert patients["loss_on"](model) == pytest.approx(before, abs=1e-5)
    assert model.model.layers[0].self_attn.k_proj.weight.shape == (64, 128)


@pytest.mark.slow
def test_zeros_and_masks_save_nothing_and_smaller_shapes_do(patients):
    for way in ("smallest", "narrow"):
        after, again, masks, memory, file, model = patients["cure"](patients[way], 0, steps=2)
        dense = patients["stored"](patients["patients"][0])[0]
        assert (memory == dense) == (way == "smallest")
        assert (masks > dense) == (way == "smallest") and file > memory
        assert not patients["prune"].is_pruned(model)
    CHAPTER.run("sparse-run", patients)
    assert patients["ratios"][0.5] > 1


def test_the_small_models_miss_nothing_that_is_pruned(patients):
    """So the page says that they rank no way of pruning; one that does makes its cell fail."""
    control, cut = (
        patients["cure"](lambda model: None, 0),
        patients["cure"](patients["one_layer"], 0),
    )
    patients["more_of"] = {"one layer of two": [cut[1] - control[1]]}
    CHAPTER.run("prune-words", patients)
    patients["more_of"]["another"] = [0.06, 0.08]
    with pytest.raises(AssertionError):
        CHAPTER.run("prune-words", patients)


def test_the_commands_for_tensorrt_are_those_of_its_release():
    """Version 11 has no flags of precision: the file says the formats, and AutoCast writes it."""
    commands = CHAPTER.text["trtexec"].split("```")[1]
    for flag in ("--fp16", "--bf16", "--int8", "--fp8", "--best", "--stronglyTyped"):
        assert flag not in commands
    cast, build, run = commands.replace("\\\n", "").splitlines()[1:]
    assert cast.endswith("--output_path fp16.onnx") and "--onnx=fp16.onnx" in build
    assert "--loadEngine" in run


def test_a_compiled_function_keeps_less_and_is_made_again_for_other_lists(chapter):
    CHAPTER.run("compile-run compile-show recompile", chapter)
    assert chapter["kept_by"] == [4 * 256, 0]
    x, gate = (torch.randn(256, 256, requires_grad=True) for _ in range(2))
    grads = [torch.autograd.grad(f(x, gate), (x, gate)) for f in map(chapter.get, NAMES)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


NAMES = ("gated", "compiled")


@pytest.mark.slow
@here
def test_the_exported_model_says_the_same_at_every_size_and_a_fixed_one_refuses(patients):
    CHAPTER.run("onnx-here onnx-export onnx-run onnx-same", patients)
    CHAPTER.run("onnx-fixed onnx-int8-run onnx-times", patients)
    assert set(patients["spent"].index) == {"eager", "ORT", "ORT int8"}
    assert "Got: 3 Expected: 2" in patients["fixed"]
    assert max(patients["aparts"]) < 1e-4 < patients["off8"]


def test_without_the_packages_a_cell_says_how_to_get_them(patients, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    CHAPTER.run("sparse-ao onnx-here", patients)
    said = "not run: pip install torchao\npip install onnx onnxscript onnxruntime\n"
    assert capsys.readouterr().out == said
    CHAPTER.run("onnx-export onnx-run onnx-same onnx-fixed onnx-int8-run", patients)
    assert patients["fixed"] is None


def test_quantized_models_are_smaller_and_say_the_same(patients):
    CHAPTER.run("sparse-ao quantized-run quantized-all quantized-facts", patients)
    assert patients["sizes"]["bf16"] * 2 == patients["sizes"]["fp32"]
    assert ("torchao int4" in patients["sizes"]) == patients["AO"]
    assert not patients["AO"] or "Only CUDA tensors" in patients["refused"]


class Code(str):
    """A wrong answer that is written as code."""

    __repr__ = str.__str__


ALL_AXES = Code("({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)")


@pytest.mark.parametrize("number, wrong", [(1, 73_728_000), (2, 5), (3, 0.5), (4, ALL_AXES)])
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(chapter, capsys, number, wrong):
    CHAPTER.run("exercise-1-wanted" + " buggy" * (number == 3), chapter)
    CHAPTER.check_exercise(number, wrong, chapter, capsys)
