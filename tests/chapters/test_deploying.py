"""Chapter 18: what it prints of inference is so, a zero saves nothing, each trap is one."""

import copy
import importlib.util

import pytest
import torch
from notebook import Notebook
from torch.nn.utils import prune
from transformers import DynamicCache

from memlab import find_gpu, models, server, simulate
from memlab.book.chapters import deploying, pruning
from memlab.book.chapters.patients import Patients, linears
from memlab.predict.formula_serving import kv_cache_bytes

CHAPTER = Notebook("18-deploying")
here = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("onnx", "onnxscript", "onnxruntime"))),
    reason="onnx, onnxscript and onnxruntime are optional",
)


@pytest.fixture(scope="module")
def chapter():
    return CHAPTER.run("imports first situation-facts")


@pytest.fixture(scope="module")
def patients():
    three = Patients("cpu", layers=2, steps=120, rate=3e-3)
    assert max(three.base) < 5  # 6.24 is a guess
    return three


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
    assert f"{held / weights:.1f} in the mean of Llama 3 8B" in text
    # The T4 runs out at the output layer, when the rest is there.
    with pytest.raises(torch.OutOfMemoryError, match=f"allocate {outer / 2**20:.2f} MiB"):
        simulate(chapter["llama"], "T4")
    assert 2 * weights - outer < find_gpu("T4").usable < 2 * weights


def test_a_long_text_wants_small_weights_and_a_small_cache():
    """Of Llama 3.1 8B 131,072 tokens on a card of 24 GB."""
    assert (
        "131,072 tokens of Llama 3.1 8B take 16 GiB of cache, at 128 KiB each"
        in CHAPTER.text["server-words"]
    )
    cache = kv_cache_bytes("llama-3.1-8b", 131_072)
    assert cache == 131_072 * 128 * 1024 == 16 * 2**30
    for weights in ("fp8", "awq", "16 bits"):
        left = server("llama-3.1-8b", "RTX-4090", weights, texts=1).cache
        assert max(left) < cache and (min(left) > cache / 2) == (weights != "16 bits")


def test_layers_without_a_growing_cache_are_named():
    """Of Qwen3.5 three layers of four; a server's start counts windows in full."""
    kinds = models.config("qwen3.5-9b").layer_types
    assert kinds.count("linear_attention") * 4 == len(kinds) * 3
    assert "as three of four are in Qwen3.5" in CHAPTER.text["published-text"]
    assert server("gemma-3-12b", "A100-80GB").token == kv_cache_bytes("gemma-3-12b", 1)


def test_published_figures_stand_beside_ours(chapter):
    frame = deploying.published_table(chapter["served"].prefill["weights"])
    assert len(frame) == 4 and frame["error"].abs().max() < 0.003
    CHAPTER.run("speed", chapter)
    low, high = map(float, deploying.speed(chapter["today"], 200).split("–"))
    assert low < 23.15 < high


def test_published_times_of_a_token_stand_beside_ours():
    """Nobody had looked at them while the host's times were chosen."""
    found = deploying.token_times()["error"]
    assert found.abs().median() < 0.25 and found.idxmin() == 16
    assert found.between(-0.35, 0.25).all()


def test_live_caches_are_the_simulated_ones_and_the_formulas():
    compared = deploying.compared_twins()
    assert (compared["simulated"] == compared["live"]).all()
    assert set(compared.index.get_level_values("model")) == set(deploying.TWINS)


def test_the_shown_loop_writes_what_generate_writes(chapter):
    CHAPTER.run("loop-code", chapter)
    twin = models.build("llama-3-8b-tiny").eval()
    prompt = torch.arange(1, 33)[None]
    ours = chapter["generate"](twin, prompt, 8, DynamicCache(config=twin.config))
    twin.generation_config.eos_token_id = None
    theirs = twin.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(ours, theirs) and ours.shape == (1, 40)


def test_logits_of_a_whole_prompt_raise_the_peak(chapter):
    CHAPTER.run("logits-run", chapter)
    assert chapter["whole"].prefill["logits"] == 4096 * 128_256 * 2
    assert chapter["more"] > 0


@pytest.mark.slow
def test_a_window_lowers_the_cache_and_not_the_prefill():
    runs = deploying.caches()
    at_end = {name: run.kv_cache for name, run in runs.items()}
    full, window = (models.config("mistral-7b") for _ in range(2))
    full.sliding_window, window.sliding_window = None, 1024
    assert at_end["dynamic"] == kv_cache_bytes(full, 4096 + 63, 8)
    held = kv_cache_bytes(window, 4096 + 63, 8)
    assert at_end["sliding"] == pytest.approx(held, abs=1024)
    assert at_end["none"] == 0 and 0.49 < at_end["fp8"] / at_end["dynamic"] < 0.51
    kept = [runs[name].prefill["kv_cache"] for name in ("sliding", "dynamic")]
    assert kept[0] > 0.9 * kept[1]


def test_blocks_hold_more_texts_than_reservations(chapter):
    paged = deploying.paged(chapter["served"].prefill["weights"])
    assert "Four hundred requests of random lengths up to 4,096" in CHAPTER.text["paged"]
    lengths, fits = paged.lengths, paged.in_blocks
    assert len(lengths) == 400 and 4000 < lengths.max() <= 4096
    assert 1.8 * paged.reserved < fits < 400 and 0 < paged.empty < 0.02
    held = lengths[:fits].sum().item() * paged.token
    assert held <= paged.room < lengths[: fits + 1].sum().item() * paged.token * 1.02


@pytest.mark.slow
def test_a_mask_keeps_the_share_and_a_cut_keeps_the_function(patients):
    for way, share in ((pruning.smallest, 0.2), (pruning.two_of_four, 0.5)):
        model = copy.deepcopy(patients.models[0])
        way(model)
        for layer in linears(model).values():
            assert layer.weight_mask.mean().item() == pytest.approx(share, abs=1e-3)
            if way is pruning.two_of_four:
                assert (layer.weight_mask.reshape(-1, 4).sum(1) == 2).all()
    # Neurons that are zero can be cut without a change.
    model = copy.deepcopy(patients.models[0])
    for block in model.model.layers:
        block.mlp.down_proj.weight.data[:, ::2] = 0
    before = patients.loss(model)
    pruning.narrow(model)
    assert patients.loss(model) == pytest.approx(before, abs=1e-5)


@pytest.mark.slow
def test_zeros_and_masks_save_nothing_and_smaller_shapes_do(patients):
    dense = pruning.stored(patients.models[0])[0]
    for way in (pruning.smallest, pruning.narrow):
        run = pruning.cure(patients, way, 0, steps=2)
        zeros = way is pruning.smallest
        assert (run.memory == dense) == zeros and (run.with_masks > dense) == zeros
        assert run.file > run.memory and not prune.is_pruned(run.model)
    assert pruning.in_csr(0.5) > 1 > pruning.in_csr(0.95)


def test_the_small_models_miss_nothing_that_is_pruned(patients):
    """So the page says that they rank no way of pruning."""
    runs = {name: [pruning.cure(patients, pruning.WAYS[name], 0)] for name in pruning.WAYS}
    assert pruning.more_than_unpruned(runs) < 0.05


def test_the_commands_for_tensorrt_are_those_of_its_release():
    """Version 11 has no flags of precision: the file says the formats, and AutoCast writes it."""
    commands = CHAPTER.text["trtexec"].split("```")[1]
    for flag in ("--fp16", "--bf16", "--int8", "--fp8", "--best", "--stronglyTyped"):
        assert flag not in commands
    cast, build, run = commands.replace("\\\n", "").splitlines()[1:]
    assert cast.endswith("--output_path fp16.onnx") and "--onnx=fp16.onnx" in build
    assert "--loadEngine" in run


def test_a_compiled_function_keeps_less_and_is_made_again_for_other_lists(chapter):
    CHAPTER.run("compile-run compile-show", chapter)
    assert chapter["kept_by"] == [4 * 256, 0]
    assert list(deploying.graphs_made().values()) == [1, 2, 5]
    x, gate = (torch.randn(256, 256, requires_grad=True) for _ in range(2))
    pair = chapter["gated"], chapter["compiled"]
    grads = [torch.autograd.grad(f(x, gate), (x, gate)) for f in pair]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
@here
def test_the_exported_model_says_the_same_at_every_size(chapter, patients):
    chapter["patients"] = patients
    CHAPTER.run("onnx-here onnx-export onnx-run", chapter)
    runtime = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(chapter["path"])
    for tokens in (patients.unseen[:2], patients.unseen[:5, :20], patients.unseen[:1, :7]):
        (given,) = session.run(None, {"input_ids": tokens.numpy()})
        with torch.no_grad():
            wanted = patients.models[0](input_ids=tokens).logits
        assert (torch.from_numpy(given) - wanted).abs().max() < 1e-4


def test_without_the_packages_a_cell_says_how_to_get_them(chapter, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    CHAPTER.run("onnx-here onnx-export", chapter)
    assert capsys.readouterr().out == "pip install onnx onnxscript onnxruntime\n"


def test_quantized_models_are_smaller_and_say_the_same(patients):
    frame = deploying.compared_formats(patients)
    held, loss = frame["KiB"], frame["loss"]
    assert held["bf16"] * 2 == held["fp32"] and held["nf4"] < held["int8"] < held["fp32"]
    assert (loss - loss["fp32"]).abs().max() < 0.1
    if deploying.TORCHAO:
        assert held["torchao int4"] == held["torchao int8"]  # the trap


class Code(str):
    """A wrong answer that is written as code."""

    __repr__ = str.__str__


ALL_AXES = Code("({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)")


@pytest.mark.parametrize("number, wrong", [(1, 73_728_000), (2, 5), (3, 0.5), (4, ALL_AXES)])
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(chapter, capsys, number, wrong):
    CHAPTER.run("exercise-1-wanted" + " prune-line buggy" * (number == 3), chapter)
    CHAPTER.check_exercise(number, wrong, chapter, capsys)
