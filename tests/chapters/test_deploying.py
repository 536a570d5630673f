"""Chapter 18: its loop is generate, its pruning keeps the share, its export says the same."""

import copy
import importlib.util

import pytest
import torch
from notebook import Notebook
from transformers import DynamicCache

from memlab import models
from memlab.book.chapters import pruning
from memlab.book.chapters.patients import Patients, linears

CHAPTER = Notebook("18-deploying")
here = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("onnx", "onnxscript", "onnxruntime"))),
    reason="onnx, onnxscript and onnxruntime are optional",
)


@pytest.fixture(scope="module")
def chapter():
    return CHAPTER.run("imports")


@pytest.fixture(scope="module")
def patients():
    three = Patients("cpu", layers=2, steps=120, rate=3e-3)
    assert max(three.base) < 5  # 6.24 is a guess
    return three


def test_the_shown_loop_writes_what_generate_writes(chapter):
    CHAPTER.run("loop-code", chapter)
    twin = models.build("llama-3-8b-tiny").eval()
    prompt = torch.arange(1, 33)[None]
    ours = chapter["generate"](twin, prompt, 8, DynamicCache(config=twin.config))
    twin.generation_config.eos_token_id = None
    theirs = twin.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(ours, theirs) and ours.shape == (1, 40)


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
