"""How a quantized base comes to the card, against transformers' own loader."""

import pytest
import torch
from helpers import QLORA
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BitsAndBytesConfig

from memlab import Serving, SimulatedGPU, find_gpu, models
from memlab.libraries import import_bitsandbytes
from memlab.predict.recipe_log import LEFT_FREE, warm_up_bytes
from memlab.predict.run import two_steps
from memlab.predict.simulate import full_log, peak_reserved_of, serve
from memlab.trace.events import Alloc
from memlab.workloads.quantized import COMPUTE_DTYPES

import_bitsandbytes("this test")
A100 = find_gpu("A100-40GB")


def loaded_by_transformers(recipe, folder):
    """(whether it is taken, bytes) of every request of a from_pretrained in a simulated GPU."""
    dtype = COMPUTE_DTYPES[recipe.compute_dtype]
    models.build(recipe.model, dtype=dtype).save_pretrained(folder)
    config = BitsAndBytesConfig(load_in_8bit=True)
    if recipe.base != "int8":
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=recipe.base,
            bnb_4bit_use_double_quant=recipe.double_quant,
            bnb_4bit_compute_dtype=dtype,
        )
    kind = AutoModelForSeq2SeqLM if recipe.task == "seq2seq-lm" else AutoModelForCausalLM
    with SimulatedGPU(A100) as simulated:
        model = kind.from_pretrained(
            folder, quantization_config=config, device_map="cuda", dtype=dtype
        )
        trace = list(simulated.tracer.allocator.trace)
        del model
    return [(kind == "alloc", n) for kind, _, n in trace if kind in ("alloc", "free")]


def between_births(events):
    """What is freed between two allocs, in whatever order, leaves the same behind."""
    rounds = [[]]
    for born, nbytes in events:
        if born:
            rounds.append([nbytes])
        else:
            rounds[-1].append(nbytes)
    return [sorted(sizes) for sizes in rounds if sizes]


@pytest.mark.parametrize(
    "changes",
    [
        {"double_quant": True},
        {"base": "fp4", "compute_dtype": "fp16"},
        {"base": "int8"},
        {"base": "int8", "compute_dtype": "fp16"},
        {"model": "gpt2-tiny", "compute_dtype": "fp16"},
        {"model": "gpt2-tiny", "base": "int8"},
        {"model": "t5-3b-tiny", "compute_dtype": "fp16"},
    ],
)
def test_a_base_is_loaded_as_from_pretrained_loads_it(changes, tmp_path):
    recipe = QLORA.but(upcast=False, **changes)
    done = loaded_by_transformers(recipe, tmp_path)
    ours = [(True, warm_up_bytes(recipe)), (False, warm_up_bytes(recipe))]
    for _, step in full_log(recipe, A100).events():
        if isinstance(step, tuple):
            ours.append((type(step) is Alloc, getattr(step, "alloc", step).nbytes))
    assert between_births(ours[: len(done)]) == between_births(done)


def test_the_warm_up_leaves_room_on_the_card():
    whole = warm_up_bytes(QLORA)
    serving = Serving(QLORA.model, weights="nf4", compute_dtype="bf16")
    assert whole == warm_up_bytes(QLORA, LEFT_FREE + whole) == warm_up_bytes(serving)
    assert warm_up_bytes(QLORA, LEFT_FREE + 1000) == 1000
    assert warm_up_bytes(QLORA, LEFT_FREE) == warm_up_bytes(QLORA, 0) == 0


@pytest.mark.parametrize("grows", [False, True])
def test_a_loop_on_a_simulated_gpu_takes_what_is_simulated(grows, monkeypatch):
    recipe = QLORA.but(expandable_segments=grows)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", f"expandable_segments:{grows}")
    with SimulatedGPU(A100) as card:
        torch.empty(warm_up_bytes(recipe), dtype=torch.uint8, device="cuda")
        two_steps(recipe, card)
    log = full_log(recipe, A100)
    reserved = serve(recipe, log, A100).peak_reserved
    assert card.footprint.peak_reserved == reserved == peak_reserved_of(recipe, log, A100)
