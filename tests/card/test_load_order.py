"""Orders in which a quantized base is loaded, against transformers' own loader."""

import pytest
import torch
from helpers import QLORA
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from memlab import SimulatedGPU, models, simulate
from memlab.card import load_order
from memlab.card.load_order import LEFT_FREE, loaded_by_transformers, peak_reserved
from memlab.gpus import find_gpu
from memlab.libraries import import_bitsandbytes
from memlab.predict.run import log_of, two_steps
from memlab.trace.events import Alloc

import_bitsandbytes("this test")
MiB = 2**20


@pytest.fixture(scope="module")
def log():
    return log_of(QLORA)


def weights_of(log):
    return load_order.by_weight(log)[0]


@pytest.mark.parametrize("model, base", [("llama-3-8b", "nf4"), ("gpt2", "nf4"), ("gpt2", "int8")])
def test_one_by_one_is_what_transformers_does(model, base, tmp_path):
    """Its from_pretrained, run in a simulated GPU, makes the same requests in the same order."""
    recipe = QLORA.but(model=f"{model}-tiny", base=base, compute_dtype="fp16")
    models.build(recipe.model, dtype=torch.float16).save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_8bit=True)
    if base == "nf4":
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16
        )
    with SimulatedGPU("A100-40GB") as simulated:
        AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=config, device_map="cuda", dtype=torch.float16
        )
        done = [
            (kind == "alloc", nbytes)
            for kind, _, nbytes in simulated.tracer.allocator.trace
            if kind in ("alloc", "free")
        ]
    log = log_of(recipe)
    one_by_one = loaded_by_transformers(log, find_gpu("A100-40GB").total_memory)
    _, afterwards = load_order.by_weight(log)
    load = one_by_one[: -len(afterwards)]
    said = [
        (type(step) is Alloc, (step if type(step) is Alloc else step.birth).nbytes)
        for _, step in load
    ]
    assert between_births(said) == between_births(done[: len(said)])


def between_births(events):
    """What is freed between two births, in whatever order, leaves the same behind."""
    rounds = [[]]
    for born, nbytes in events:
        if born:
            rounds.append([nbytes])
        else:
            rounds[-1].append(nbytes)
    return [sorted(sizes) for sizes in rounds if sizes]


def test_the_warm_up_leaves_room_on_the_card(log):
    totals = None, LEFT_FREE + MiB, LEFT_FREE
    unlimited, tight, none = (loaded_by_transformers(log, total) for total in totals)
    assert unlimited[0][1].nbytes > MiB == tight[0][1].nbytes
    assert none[0][0] != "warm-up"


def test_a_recipe_is_loaded_as_transformers_does_and_a_moved_model_is_not(log):
    assert simulate(QLORA).peak_reserved == peak_reserved(loaded_by_transformers(log))
    with SimulatedGPU() as card:
        two_steps(QLORA, card)
    assert card.footprint.peak_reserved == peak_reserved(log.events())
    grown = simulate(QLORA.but(expandable_segments=True))
    assert grown.peak_reserved == peak_reserved(loaded_by_transformers(log), None, True)
