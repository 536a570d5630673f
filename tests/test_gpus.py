"""Cards: figures in a sane relation to each other and to published messages; bad input."""

import dataclasses

import pytest

from memlab.gpus import GPUS, cublas_workspace, find_gpu, gpu_of_device, native_dtypes
from memlab.units import MiB

# "GPU 0 has a total capacity of ... GiB", as PyTorch 2 printed it in the threads that the records
# name.
PRINTED_GIB = {
    "T4": "14.56",
    "P100": "15.89",
    "V100": "15.77",
    "L4": "22.03",
    "A10G": "22.06",
    "RTX-3090": "23.56",
    "RTX-4090": "23.64",
    "L40S": "44.40",
    "A100-40GB": "39.49",
    "A100-80GB": "79.25",
    "H100": "79.19",
    "H200": "139.80",
}


# Compute capability, GB on the box, streaming multiprocessors, GB/s of memory, and 10^12 operations
# a second: fp32 of ordinary cores; of tensor cores, without sparsity and added in fp32, tf32, fp16
# (as bf16, where there is), fp8, int8. Sources: NVIDIA's table "CUDA GPU compute capability"; the
# data sheets of T4, P100 (PCIe), V100 (SXM2), L4, L40S, A100 (40 GB; 80 GB SXM), H100 (SXM) and
# H200 (SXM); AWS's page on G5 (A10G); NVIDIA's whitepapers of GA102 (3090) and of Ada (4090).
SHEETS = {
    "T4": ((7, 5), 16, 40, 320, 8.1, None, 65, None, 130),
    "P100": ((6, 0), 16, 56, 732, 9.3, None, 18.7, None, None),
    "V100": ((7, 0), 16, 80, 900, 15.7, None, 125, None, None),
    "L4": ((8, 9), 24, 58, 300, 30.3, 60, 121, 242.5, 242.5),
    "A10G": ((8, 6), 24, 80, 600, 35, 35, 70, None, 140),
    "RTX-3090": ((8, 6), 24, 82, 936, 35.6, 35.6, 71, None, 284),
    "RTX-4090": ((8, 9), 24, 128, 1008, 82.6, 82.6, 165.2, 330.3, 660.6),
    "L40S": ((8, 9), 48, 142, 864, 91.6, 183, 362, 733, 733),
    "A100-40GB": ((8, 0), 40, 108, 1555, 19.5, 156, 312, None, 624),
    "A100-80GB": ((8, 0), 80, 108, 2039, 19.5, 156, 312, None, 624),
    "H100": ((9, 0), 80, 132, 3350, 67, 494.7, 989.4, 1978.9, 1978.9),
    "H200": ((9, 0), 141, 132, 4800, 67, 494.7, 989.4, 1978.9, 1978.9),
}


@pytest.mark.parametrize("name", GPUS)
def test_a_card_is_what_its_maker_says(name):
    card = GPUS[name]
    capability, label, processors, bandwidth, fp32, tf32, fp16, fp8, int8 = SHEETS[name]
    assert (card.capability, card.processors) == (capability, processors)
    assert card.bandwidth == bandwidth * 1e9
    assert 0.9 * label < card.total_memory / 1e9 < 1.08 * label
    said = {"float32": fp32, "tf32": tf32, "float16": fp16, "int8": int8}
    said |= {"bfloat16": fp16 if capability >= (8, 0) else None}
    said |= dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), fp8)
    assert card.rates == {name: n * 1e12 for name, n in said.items() if n is not None}


@pytest.mark.parametrize("name", PRINTED_GIB)
def test_total_memory_prints_as_pytorch_printed_it(name):
    assert f"{GPUS[name].total_memory / 2**30:.2f}" == PRINTED_GIB[name]


def test_every_card_has_sources_and_a_context_of_a_lazily_loaded_pytorch():
    assert set(GPUS) == set(PRINTED_GIB)
    for card in GPUS.values():
        assert "total" in card.sources
        assert "context" in card.sources
        assert 100 * MiB < card.context < 700 * MiB
        assert card.usable == card.total_memory - card.context


def test_the_t4():
    card = find_gpu("T4")
    assert card.total_memory == 14912 * MiB
    assert card.context == int(140.875 * MiB)
    assert card.workspace == 8_519_680
    assert "bfloat16" not in card.native_dtypes


def test_rules_by_capability():
    assert cublas_workspace((8, 9)) == 8_519_680
    assert cublas_workspace((9, 0)) == 32 * MiB
    assert find_gpu("H200").workspace == 32 * MiB
    assert native_dtypes((7, 0)) == ("float32", "float16")
    assert {"bfloat16", "tf32"} <= set(native_dtypes((8, 0)))
    assert "float8_e4m3fn" in native_dtypes((8, 9))
    assert "float8_e4m3fn" not in native_dtypes((8, 6))
    has = {c: set(native_dtypes(c)) for c in ((7, 0), (7, 5), (8, 9), (9, 0), (10, 0))}
    assert {c for c, names in has.items() if "int8" in names} == set(has) - {(7, 0)}
    assert {c for c, names in has.items() if "int4" in names} == {(7, 5), (8, 9)}
    assert {c for c, names in has.items() if "float4_e2m1fn" in names} == {(10, 0)}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("t4", "T4"),
        ("Tesla T4", "T4"),
        ("rtx 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("a100_80gb", "A100-80GB"),
        (" h200 ", "H200"),
        ("V100 16GB", "V100"),
        ("NVIDIA A10G", "A10G"),
        ("4090", "RTX-4090"),
        ("RTX4090", "RTX-4090"),
        ("A100-80", "A100-80GB"),
        ("a100 40 gb", "A100-40GB"),
        ("h100 80gb", "H100"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("L40S 48GB", "L40S"),
    ],
)
def test_names_are_forgiven_case_spaces_and_maker(given, name):
    assert find_gpu(given) is GPUS[name]


def test_a_number_of_bytes_is_all_for_the_allocator():
    card = find_gpu(16 * 2**30)
    assert card.total_memory == card.usable == 16 * 2**30
    assert card.name == "16,384 MiB"
    assert find_gpu(5e8).total_memory == 500_000_000
    assert find_gpu(card) is card


def test_no_card_is_one_without_a_limit():
    card = find_gpu(None)
    assert card.usable is card.total_memory is card.context is None
    assert card.workspace == cublas_workspace((8, 0))


def test_a_card_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        find_gpu("T4").total_memory = 1


@pytest.mark.parametrize(
    "wrong",
    [
        "T5",
        "",
        "A100",
        "TITAN",
        "RTX",
        "16GB",
        "V100 32GB",
        "H100 40",
        "NVIDIA H100 PCIe",
        "H100-NVL",
        "H200 NVL",
        0,
        -1,
        0.5,
        float("nan"),
        float("inf"),
        True,
        [1],
    ],
)
def test_what_is_no_card(wrong):
    with pytest.raises(ValueError) as error:
        find_gpu(wrong)
    text = str(error.value)
    assert "\n" not in text
    assert repr(wrong) in text
    assert "T4, P100" in text


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("A100", "'A100', which may be A100-40GB or A100-80GB: allowed"),
        ("nvidia a100", "which may be A100-40GB or A100-80GB: allowed"),
        ("A10", "the nearest is A10G"),
        ("RTX 409", "the nearest is RTX-4090"),
        ("H10O", "the nearest is H100"),
        ("something else", "'something else': allowed"),
    ],
)
def test_what_an_unknown_name_may_mean(wrong, hint):
    with pytest.raises(ValueError, match=hint):
        find_gpu(wrong)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
    ],
)
def test_the_card_that_a_driver_means(device, name):
    assert gpu_of_device(device) is GPUS[name]


@pytest.mark.parametrize(
    "device",
    [
        "CPU (x86_64, 2 threads)",
        "NVIDIA L40",
        "",
        "Tesla K80",
        "NVIDIA H100 PCIe",
        "NVIDIA H200 NVL",
    ],
)
def test_a_device_that_is_no_known_card(device):
    assert gpu_of_device(device) is None
