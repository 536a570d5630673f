"""bitsandbytes' kernels and layers on the simulated card."""

import copy
import inspect
import re

import pytest
import torch
from accelerate import init_empty_weights
from helpers import QLORA, allocated
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from memlab import SimulatedGPU, models, simulate
from memlab.card.kernels.bitsandbytes import cuda_module, fuses_4bit_product
from memlab.gpus import find_gpu
from memlab.libraries import import_bitsandbytes
from memlab.trace.quantized_weights import constants
from memlab.trace.tensors import on_card
from memlab.workloads.training import Training

bitsandbytes = import_bitsandbytes("this test")


def test_a_product_writes_the_weight_out_except_for_few_tokens():
    def highest(tokens, nested=False):
        with SimulatedGPU("T4"):
            layer = bitsandbytes.nn.Linear4bit(1024, 1024, False, torch.float16, nested)
            layer = layer.to("cuda")
            x = torch.randn(tokens, 1024, device="cuda", dtype=torch.float16)
            layer(x)
            torch.cuda.reset_peak_memory_stats()
            before = allocated()
            layer(x)
            return torch.cuda.max_memory_allocated() - before - 2 * tokens * 1024

    assert highest(4) == 0
    assert highest(2048) == 2 * 1024 * 1024
    scales = 4 * 1024 * 1024 // 64
    assert highest(2048, nested=True) == 2 * 1024 * 1024 + 2 * scales


@pytest.mark.parametrize("kind", ["Linear4bit", "Linear8bitLt"])
@pytest.mark.parametrize("width", [64, 4096])  # with data on the host, and without
def test_a_library_makes_a_parameter_anew_by_its_type_and_what_it_holds(t4, kind, width):
    """As diffusers' layers under accelerate's init_empty_weights, before they are quantized."""
    make, more = getattr(bitsandbytes.nn, kind), {"has_fp16_weights": False}
    more = {"quant_type": "nf4"} if kind == "Linear4bit" else more
    with init_empty_weights():
        layer = make(width, width, bias=False, **more)
    assert layer.weight.device.type == "meta"
    named = "Params4bit" if kind == "Linear4bit" else "Int8Params"
    assert type(layer.weight).__name__ == named
    assert isinstance(layer.weight, getattr(bitsandbytes.nn, named))
    values = torch.randn(width, width, dtype=torch.float16)
    settings = dict(layer.weight.__dict__)
    layer.weight = type(layer.weight)(values, requires_grad=False, **settings)
    layer.to("cuda")
    held = allocated()
    assert 4 * width * width < 8 * held < 9 * width * width + 8 * 4 * 1024
    assert layer.weight.dtype in (torch.uint8, torch.int8)


def test_weights_that_stay_in_half_precision_are_not_quantized_by_their_move(t4):
    layer = bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=True).half().cuda()
    assert layer.weight.dtype == torch.float16 and layer.weight.is_cuda


@pytest.mark.parametrize("width", [64, 2048])  # with data on the host, and without
def test_a_quantized_layer_goes_to_the_host_with_all_that_belongs_to_it(t4, width):
    """Params4bit.to moves its constants, too. The library keeps the table of the scales' codes."""
    layer = bitsandbytes.nn.Linear4bit(width, width, bias=False).cuda()
    held, table = allocated(), 256 * 4
    for move in (layer.cpu, lambda: layer.to("cpu")):
        move()
        assert allocated() == table
        assert layer.weight.is_cpu and layer.weight.dtype == torch.uint8
        assert not any(part.is_cuda for part in constants(layer.weight))
        assert isinstance(layer.weight, bitsandbytes.nn.Params4bit)
        layer.cuda()
        assert allocated() == held and layer.quant_state is layer.weight.quant_state
        assert all(part.is_cuda for part in constants(layer.weight))


@pytest.mark.parametrize("width", [64, 2048])
def test_an_8_bit_layer_leaves_its_old_numbers_on_the_card(t4, width):
    """Int8Params.to makes a parameter, of which Module._apply takes the data and not the CB."""
    layer = bitsandbytes.nn.Linear8bitLt(width, width, bias=False, has_fp16_weights=False).cuda()
    held = allocated()
    layer.cpu()
    assert layer.weight.is_cpu and layer.weight.dtype == torch.int8
    assert layer.weight.CB.is_cuda and allocated() == held
    layer.cuda()
    assert allocated() == held + width * width
    layer(torch.ones(2, width, device="cuda", dtype=torch.half))  # its state takes over the CB
    assert layer.weight.CB is None and allocated() == held
    layer.to("cpu")  # Linear8bitLt.to, which moves the state
    assert allocated() == 0
    weight = quantized("Int8Params").cpu()
    assert isinstance(weight, bitsandbytes.nn.Int8Params) and allocated() == 0
    assert weight.CB.is_cpu and weight.SCB.is_cpu


def test_only_4_bit_weights_that_lie_on_the_card_are_quantized_there(on_card):
    """Int8Params.to asks that the weight comes from the host."""
    four = bitsandbytes.nn.Linear4bit(64, 64, bias=False)
    eight = bitsandbytes.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
    assert four.half().weight.dtype == eight.half().weight.dtype == torch.half
    assert four.cuda().weight.dtype == torch.uint8
    assert eight.cuda().weight.dtype == eight.weight.cuda().dtype == torch.half
    eight(torch.ones(2, 64, dtype=torch.half))
    assert eight.weight.dtype == torch.int8


def test_a_4_bit_weight_is_quantized_by_a_move_to_the_host_too(t4):
    layer = bitsandbytes.nn.Linear4bit(2048, 2048, bias=False).cpu()
    assert layer.weight.is_cpu and layer.weight.dtype == torch.uint8 and allocated() == 0


@pytest.mark.parametrize("mode", ["nf4", "fp4-dq", "int8"])
def test_lightnings_fabric_quantizes_the_layers_that_it_makes(mode):
    fabric = pytest.importorskip("lightning.fabric")
    dtype = torch.float16 if mode == "int8" else torch.bfloat16
    with SimulatedGPU("L4"):
        precision = fabric.plugins.BitsandbytesPrecision(mode, dtype=dtype)
        fabric = fabric.Fabric(accelerator="cuda", devices=1, plugins=precision)
        with fabric.init_module():
            layer = torch.nn.Linear(1024, 1024, bias=False)
        weight = fabric.setup_module(layer).weight
        assert weight.dtype in (torch.uint8, torch.int8)
        per_weight = 1 if mode == "int8" else 0.5
        assert 1 <= allocated() / (1024 * 1024 * per_weight) < 1.2


def test_bitsandbytes_own_rule_is_asked_for_the_card():
    """_gemm_4bit_use_custom_cuda: up to 4 rows always, above 1,536 never, by the card between."""

    def fuses(name, rows):
        card = find_gpu(name)
        kind = card.processors, *card.capability
        return fuses_4bit_product(kind, torch.float16, rows, 4096, 4096)

    for name in ("T4", "A100-40GB", "H200"):
        assert fuses(name, 4) and not fuses(name, 2048)
    assert not fuses("V100", 8) and fuses("T4", 8)


def test_the_first_run_of_a_process_is_like_the_second():
    """bitsandbytes keeps the table of the scales' codes, once made."""
    recipe = QLORA.but(double_quant=True)
    bitsandbytes.functional.name2qmap.clear()
    first, second = simulate(recipe), simulate(recipe)
    assert first == second
    Training(recipe).step()  # with data, the table is a real one


def test_a_weight_that_is_quantized_by_itself_is_a_parameter(gpu):
    """As transformers' loader does, which moves no module."""
    weight = torch.randn(256, 256)
    weight = bitsandbytes.nn.Params4bit(weight, False, compress_statistics=False).to("cuda")
    held = allocated()
    weight.quant_state.absmax + 1
    levels = gpu.footprint.timeline.levels
    assert levels["parameters"][-1] == 256 * 256 // 2 + 256 * 256 // 64 * 4 + 16 * 4 <= held


def quantized(kind, storage=torch.uint8):
    weight = torch.randn(256, 256)
    if kind == "Int8Params":
        return bitsandbytes.nn.Int8Params(weight, requires_grad=False).to("cuda")
    return bitsandbytes.nn.Params4bit(weight, False, quant_storage=storage).to("cuda")


@pytest.mark.parametrize("kind", ["Params4bit", "Int8Params"])
def test_a_quantized_weight_is_of_its_class(gpu, kind):
    """peft, accelerate and trl ask for its name, transformers by isinstance; of copies, too."""
    weight = quantized(kind)
    before = allocated()
    its_copy = copy.deepcopy(weight)
    for one in (weight, its_copy):
        assert one.__class__ is getattr(bitsandbytes.nn, kind)
        assert isinstance(one, getattr(bitsandbytes.nn, kind))
        assert isinstance(one, torch.nn.Parameter) and one.shape == weight.shape
    parts = [weight, *constants(weight)]
    assert len(parts) == (6 if kind == "Params4bit" else 2)
    of_a_copy = sum(-(-part.nbytes // 512) * 512 for part in parts if on_card(part))
    assert allocated() - before == of_a_copy


def test_a_weight_in_another_storage_is_quantized_once(gpu):
    weight = quantized("Params4bit", torch.bfloat16)
    before = weight.shape, allocated()
    assert weight.numel() == 256 * 256 // 4
    weight = weight.to("cuda")
    assert (weight.shape, allocated()) == before


def test_a_checkpoint_of_quantized_weights_is_loaded_as_it_is(tmp_path):
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    models.build("llama-3-8b-tiny").save_pretrained(tmp_path / "whole")
    held = []
    for folder, how in (("whole", {"quantization_config": config}), ("packed", {})):
        with SimulatedGPU("T4"):
            model = AutoModelForCausalLM.from_pretrained(
                tmp_path / folder, device_map={"": 0}, **how
            )
            if folder == "whole":
                model.save_pretrained(tmp_path / "packed")
            weight = model.model.layers[0].mlp.up_proj.weight
            state = weight.quant_state
            assert (state.shape, state.quant_type) == ((448, 128), "nf4")
            parts = [p for w in model.parameters() for p in (w, *constants(w)) if on_card(p)]
            held.append(sum(part.nbytes for part in parts))
    assert held[0] == held[1]


@pytest.mark.parametrize("given", [True, False], ids=["a state", "no state"])
def test_a_product_in_8_bits_looks_for_outliers_from_the_threshold_on(on_card, given):
    weight, x = torch.randn(16, 1024).half(), torch.randn(512, 1024).half()

    def most(threshold):
        state = bitsandbytes.MatmulLtState() if given else None
        torch.cuda.reset_peak_memory_stats()
        before = allocated()
        bitsandbytes.matmul(x, weight, state=state, threshold=threshold)
        assert state is None or state.threshold == threshold
        return torch.cuda.max_memory_allocated() - before

    most(0.0)  # which takes the workspaces
    assert most(6.0) - most(0.0) >= x.nbytes  # their absolute values


def source_of(operator):
    """bitsandbytes' CUDA kernel of an operator, as Python text."""
    text = inspect.getsource(cuda_module())
    return re.split(r"\n@register_kernel|\ndef ", text.split(f'"bitsandbytes::{operator}"')[1])[1]


@pytest.mark.parametrize(
    ("operator", "text"),
    [
        ("int8_linear_matmul", r"dtype=torch\.int32"),
        ("int8_mm_dequant", r"torch\.empty_like\(A, dtype=torch\.float16\)"),
        ("int8_vectorwise_quant", r"outliers\.any\(\)"),
        # The scales are made before the weights.
        ("quantize_4bit", r"(?s)absmax = torch\.empty.* out = torch\.empty"),
        ("quantize_blockwise", r"(?s)absmax = torch\.empty.* out = torch\.empty"),
    ],
)
def test_an_operator_has_the_lines_that_its_rule_was_read_from(operator, text):
    assert re.search(text, source_of(operator))


@pytest.mark.parametrize("kind", ["PagedAdamW32bit", "PagedLion", "PagedAdEMAMix"])
def test_states_are_paged_from_100_000_elements_on(kind):
    def held(numbers):
        with SimulatedGPU("T4"):
            weight = torch.nn.Parameter(torch.zeros(numbers, device="cuda"))
            optimizer = getattr(bitsandbytes.optim, kind)([weight])
            before = allocated()
            for _ in range(2):
                weight.grad = torch.ones_like(weight)
                optimizer.step()
                weight.grad = None
            return allocated() - before

    assert held(99_840) >= 4 * 99_840
    assert held(100_352) < 4096
