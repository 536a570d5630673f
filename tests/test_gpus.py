"""Cards: figures in a sane relation to each other and to published messages; bad input."""

import dataclasses
import re

import pytest

from memlab import Recipe, formula
from memlab.gpus import GPUS, cublas_workspace, find_gpu, gpu_of_device, native_dtypes
from memlab.units import MiB

# "GPU 0 has a total capacity of ... GiB", as PyTorch 2 printed it in the threads that the records
# name; of other cards what another program printed as the driver's total, in MiB, is below.
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
    "H100": "79.18",
    "H200": "139.80",
    "V100-32GB": "31.73",
    "L40": "44.40",
    "GH200": "94.50",
    "B200": "178.35",
    "B300": "267.69",
    "GB10": "121.69",
    "RTX-A4000": "15.61",
    "RTX-A6000": "47.43",
    "RTX-5000-Ada": "31.47",
    "RTX-PRO-6000": "94.97",
    "RTX-2080-Ti": "10.57",
    "RTX-3060": "11.63",
    "RTX-5070-Ti": "15.47",
    "RTX-5080": "15.47",
    "RTX-5090": "31.37",
    "GB200": "184.31",
    "P40": "22.38",
    "RTX-4000-Ada": "19.54",
    "RTX-A4500": "19.69",
    "RTX-5060": "7.61",
}


# Compute capability, GB on the box, streaming multiprocessors, GB/s of memory, and 10^12 operations
# a second: fp32 of ordinary cores; of tensor cores, without sparsity and added in fp32, tf32, fp16
# (as bf16, where there is), fp8, int8, and fp4 where there is. Sources:
# NVIDIA's table "CUDA GPU compute capability"; the
# data sheets of T4, P100 (PCIe), V100 (SXM2), L4, L40S, A100 (40 GB; 80 GB SXM), H100 (SXM) and
# H200 (SXM); AWS's page on G5 (A10G); NVIDIA's whitepapers of GA102 (3090) and of Ada (4090). The
# cards from the V100-32GB on are as `rates_source` says, most of them from memory.
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
    "V100-32GB": ((7, 0), 32, 80, 900, 15.7, None, 125, None, None),
    "A10": ((8, 6), 24, 72, 600, 31.2, 62.5, 125, None, 250),
    "A30": ((8, 0), 24, 56, 933, 10.3, 82, 165, None, 330),
    "A40": ((8, 6), 48, 84, 696, 37.4, 74.8, 149.7, None, 299.3),
    "L40": ((8, 9), 48, 142, 864, 90.5, 90.5, 181.05, 362, 362),
    "H100-PCIe": ((9, 0), 80, 114, 2000, 51.2, 378, 756, 1513, 1513),
    "H100-NVL": ((9, 0), 94, 132, 3938, 60, 417.5, 835.5, 1670.5, 1670.5),
    "H20": ((9, 0), 96, 78, 4000, 44, 74, 148, 296, 296),
    "GH200": ((9, 0), 96, 132, 4000, 67, 494.7, 989.4, 1978.9, 1978.9),
    "B200": ((10, 0), 180, 148, 8000, 75, 1125, 2250, 4500, 4500, 9000),
    "B300": ((10, 3), 288, 148, 8000, 75, 1125, 2250, 4500, 187.5, 13500),
    "GB10": ((12, 1), 128, 48, 273, 31, 31, 62.5, 125, 250, 500),
    "RTX-8000": ((7, 5), 48, 72, 672, 16.3, None, 130.5, None, 261),
    "RTX-A4000": ((8, 6), 16, 48, 448, 19.2, 38.3, 76.7, None, 153.4),
    "RTX-A5000": ((8, 6), 24, 64, 768, 27.8, 55.6, 111.1, None, 222.2),
    "RTX-A6000": ((8, 6), 48, 84, 768, 38.7, 77.4, 154.8, None, 309.7),
    "RTX-5000-Ada": ((8, 9), 32, 100, 576, 65.3, 130.6, 261.1, 522.2, 522.2),
    "RTX-6000-Ada": ((8, 9), 48, 142, 960, 91.1, 182.1, 364.2, 728.5, 728.5),
    "RTX-PRO-6000": ((12, 0), 96, 188, 1792, 126, 251.9, 503.8, 1007.6, 1007.6, 2015.2),
    "GTX-1080-Ti": ((6, 1), 11, 28, 484, 11.3, None, 11.3, None, None),
    "RTX-2080-Ti": ((7, 5), 11, 68, 616, 13.4, None, 53.8, None, 215.2),
    "RTX-3060": ((8, 6), 12, 28, 360, 12.7, 12.7, 25.5, None, 101.9),
    "RTX-3060-Ti": ((8, 6), 8, 38, 448, 16.2, 16.2, 32.4, None, 129.6),
    "RTX-3070": ((8, 6), 8, 46, 448, 20.3, 20.3, 40.6, None, 162.6),
    "RTX-3080": ((8, 6), 10, 68, 760, 29.8, 29.8, 59.5, None, 238),
    "RTX-3080-Ti": ((8, 6), 12, 80, 912, 34.1, 34.1, 68.2, None, 272.8),
    "RTX-3090-Ti": ((8, 6), 24, 84, 1008, 40, 40, 80, None, 320),
    "RTX-4060": ((8, 9), 8, 24, 272, 15.1, 15.1, 30.2, 60.4, 120.8),
    "RTX-4060-Ti-8GB": ((8, 9), 8, 34, 288, 22.1, 22.1, 44.2, 88.4, 176.8),
    "RTX-4060-Ti-16GB": ((8, 9), 16, 34, 288, 22.1, 22.1, 44.2, 88.4, 176.8),
    "RTX-4070": ((8, 9), 12, 46, 504, 29.1, 29.1, 58.2, 116.4, 232.8),
    "RTX-4070-Super": ((8, 9), 12, 56, 504, 35.5, 35.5, 71.0, 142.0, 284.0),
    "RTX-4070-Ti": ((8, 9), 12, 60, 504, 40.1, 40.1, 80.2, 160.4, 320.8),
    "RTX-4070-Ti-Super": ((8, 9), 16, 66, 672, 44.1, 44.1, 88.2, 176.4, 352.8),
    "RTX-4080": ((8, 9), 16, 76, 717, 48.7, 48.7, 97.4, 194.8, 389.6),
    "RTX-4080-Super": ((8, 9), 16, 80, 736, 52.2, 52.2, 104.4, 208.8, 417.6),
    "RTX-5060-Ti-16GB": ((12, 0), 16, 36, 448, 23.7, 23.7, 47.4, 94.8, 189.6, 379.2),
    "RTX-5070": ((12, 0), 12, 48, 672, 30.9, 30.9, 61.7, 123.5, 246.9, 493.9),
    "RTX-5070-Ti": ((12, 0), 16, 70, 896, 43.9, 43.9, 87.9, 175.8, 351.5, 703),
    "RTX-5080": ((12, 0), 16, 84, 960, 56.3, 56.3, 112.6, 225.1, 450.2, 900.4),
    "RTX-5090": ((12, 0), 32, 170, 1792, 104.8, 104.8, 209.5, 419, 838, 1676),
    "P40": ((6, 1), 24, 30, 346, 11.8, None, 11.8, None, 47),
    "A2": ((8, 6), 16, 10, 200, 4.5, 9.0, 18.0, None, 36.0),
    "A800": ((8, 0), 80, 108, 2039, 19.5, 156, 312, None, 624),
    "L20": ((8, 9), 48, 92, 864, 59.8, 59.8, 119.6, 239.2, 239.2),
    "H800": ((9, 0), 80, 132, 3350, 67, 494.7, 989.4, 1978.9, 1978.9),
    "GB200": ((10, 0), 186, 152, 8000, 80, 1250, 2500, 5000, 5000, 10000),
    "GB300": ((10, 3), 279, 152, 8000, 80, 1250, 2500, 5000, 208, 15000),
    "Quadro-RTX-5000": ((7, 5), 16, 48, 448, 11.2, None, 89.6, None, 179.2),
    "Quadro-RTX-6000": ((7, 5), 24, 72, 672, 16.3, None, 130.5, None, 261),
    "RTX-A2000": ((8, 6), 12, 26, 288, 8.0, 16.0, 32.0, None, 64.0),
    "RTX-A4500": ((8, 6), 20, 56, 640, 23.7, 47.4, 94.8, None, 189.6),
    "RTX-A5500": ((8, 6), 24, 80, 768, 34.1, 68.2, 136.4, None, 272.8),
    "RTX-2000-Ada": ((8, 9), 16, 22, 224, 12.0, 24.0, 48.0, 96.0, 96.0),
    "RTX-4000-Ada": ((8, 9), 20, 48, 360, 26.7, 53.4, 106.8, 213.6, 213.6),
    "RTX-4500-Ada": ((8, 9), 24, 60, 432, 39.6, 79.2, 158.4, 316.8, 316.8),
    "RTX-PRO-4000": ((12, 0), 24, 70, 672, 39.0, 78.0, 156.0, 312.0, 312.0, 624.0),
    "RTX-PRO-4500": ((12, 0), 32, 82, 896, 52.7, 105.4, 210.8, 421.6, 421.6, 843.2),
    "RTX-PRO-5000": ((12, 0), 48, 110, 1344, 64.5, 129.0, 258.0, 516.0, 516.0, 1032.0),
    "TITAN-Xp": ((6, 1), 12, 30, 547, 12.1, None, 12.1, None, None),
    "TITAN-V": ((7, 0), 12, 80, 653, 14.9, None, 110, None, None),
    "TITAN-RTX": ((7, 5), 24, 72, 672, 16.3, None, 130.5, None, 261),
    "GTX-1060": ((6, 1), 6, 10, 192, 4.4, None, 4.4, None, None),
    "GTX-1070": ((6, 1), 8, 15, 256, 6.5, None, 6.5, None, None),
    "GTX-1070-Ti": ((6, 1), 8, 19, 256, 8.2, None, 8.2, None, None),
    "GTX-1080": ((6, 1), 8, 20, 320, 8.9, None, 8.9, None, None),
    "GTX-1650": ((7, 5), 4, 14, 128, 3.0, None, 6.0, None, 12.0),
    "GTX-1660": ((7, 5), 6, 22, 192, 5.0, None, 10.0, None, 20.0),
    "GTX-1660-Super": ((7, 5), 6, 22, 336, 5.0, None, 10.0, None, 20.0),
    "GTX-1660-Ti": ((7, 5), 6, 24, 288, 5.4, None, 10.8, None, 21.6),
    "RTX-2060": ((7, 5), 6, 30, 336, 6.5, None, 26.0, None, 104.0),
    "RTX-2060-Super": ((7, 5), 8, 34, 448, 7.2, None, 28.8, None, 115.2),
    "RTX-2070": ((7, 5), 8, 36, 448, 7.5, None, 30.0, None, 120.0),
    "RTX-2070-Super": ((7, 5), 8, 40, 448, 9.1, None, 36.4, None, 145.6),
    "RTX-2080": ((7, 5), 8, 46, 448, 10.1, None, 40.4, None, 161.6),
    "RTX-2080-Super": ((7, 5), 8, 48, 496, 11.2, None, 44.8, None, 179.2),
    "RTX-3050": ((8, 6), 8, 20, 224, 9.1, 9.1, 18.2, None, 72.8),
    "RTX-3070-Ti": ((8, 6), 8, 48, 608, 21.7, 21.7, 43.4, None, 173.6),
    "RTX-3080-12GB": ((8, 6), 12, 70, 912, 30.6, 30.6, 61.2, None, 244.8),
    "RTX-4090-D": ((8, 9), 24, 114, 1008, 73.5, 73.5, 147.0, 294.0, 588.0),
    "RTX-5050": ((12, 0), 8, 20, 320, 13.2, 13.2, 26.4, 52.8, 105.6, 211.2),
    "RTX-5060": ((12, 0), 8, 30, 448, 19.2, 19.2, 38.4, 76.8, 153.6, 307.2),
    "RTX-5060-Ti-8GB": ((12, 0), 8, 36, 448, 23.7, 23.7, 47.4, 94.8, 189.6, 379.2),
}


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("T4", "Tesla T4"),
        ("L4", "NVIDIA L4"),
        ("L40S", "NVIDIA L40S"),
        ("A10", "NVIDIA A10"),
        ("A100-80GB", "NVIDIA A100-SXM4-80GB"),
        ("RTX-A6000", "NVIDIA RTX A6000"),
        ("RTX-PRO-6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("H100-PCIe", "NVIDIA H100 PCIe"),
        ("H100-NVL", "NVIDIA H100 NVL"),
        ("H200", "NVIDIA H200"),
        ("H20", "NVIDIA H20"),
        ("B200", "NVIDIA B200"),
        ("B300", "NVIDIA B300"),
    ],
)
def test_rates_are_those_that_others_keep(name, device):
    """By TRL's table, which follows torchtitan's."""
    trl = pytest.importorskip("trl.trainer.utils")
    dtype = "bfloat16" if "bfloat16" in GPUS[name].rates else "float16"
    assert GPUS[name].rates[dtype] == pytest.approx(trl.get_peak_flops(device, dtype), rel=0.01)


@pytest.mark.parametrize("name", GPUS)
def test_a_card_is_what_its_maker_says(name):
    card = GPUS[name]
    capability, label, processors, bandwidth, fp32, tf32, fp16, fp8, int8, *fp4 = SHEETS[name]
    assert (card.capability, card.processors) == (capability, processors)
    assert card.bandwidth == bandwidth * 1e9
    assert card.label == label
    assert 0.9 * label * 2**30 < card.total_memory < label * 2**30
    said = {"float32": fp32, "tf32": tf32, "float16": fp16, "int8": int8}
    said |= {"bfloat16": fp16 if capability >= (8, 0) else None}
    said |= dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), fp8)
    said |= {"float4_e2m1fn": fp4[0] if fp4 else None}
    assert card.rates == {name: n * 1e12 for name, n in said.items() if n is not None}


@pytest.mark.parametrize("name", PRINTED_GIB)
def test_total_memory_prints_as_pytorch_printed_it(name):
    assert f"{GPUS[name].total_memory / 2**30:.2f}" == PRINTED_GIB[name]


def test_every_card_has_sources_and_a_context_of_a_lazily_loaded_pytorch():
    assert set(PRINTED_GIB) < set(GPUS) == set(SHEETS)
    for card in GPUS.values():
        assert "total" in card.sources
        assert "context" in card.sources
        assert 100 * MiB < card.context < 800 * MiB
        assert card.rates_source
        assert card.usable == card.total_memory - card.context


@pytest.mark.parametrize("card", GPUS.values(), ids=GPUS)
def test_rates_are_in_the_ratios_of_the_cards_cores(card):
    """Half the bits, twice the rate; GeForce cards since Ampere add in fp32 at half the rate."""
    rate = card.rate
    if card.capability < (7, 0):  # without tensor cores
        assert rate("float16") <= 2.02 * rate("float32")
        return
    assert rate("float16") > 1.9 * rate("float32")
    if card.capability >= (8, 0):
        # The figures of Ada's GeForce and workstation cards give tf32 as half of fp16, too.
        assert rate("float16") == pytest.approx(2 * rate("tf32"), rel=0.03)
    if card.capability >= (8, 9):
        assert rate("float8_e4m3fn") == pytest.approx(2 * rate("float16"), rel=0.03)
    if card.capability >= (10, 0):
        assert rate("float4_e2m1fn") >= 1.99 * rate("float8_e4m3fn")
    if card.name.startswith("RTX-") and card.name[4:5] in "345" and "Ada" not in card.name:
        assert rate("float16") == pytest.approx(2 * rate("float32"), rel=0.02)
    seconds = card.total_memory / card.bandwidth
    assert 0.008 < seconds < 0.6  # to read all of it


def test_cards_of_one_generation_are_quicker_with_more_processors():
    for kind in ("RTX-30", "RTX-40", "RTX-50"):
        cards = [card for name, card in GPUS.items() if re.fullmatch(kind + r"\d0.*(?<!Ada)", name)]
        cards.sort(key=lambda card: card.processors)
        rates = [card.rate("float16") for card in cards]
        assert rates == sorted(rates) and len(cards) >= 5


def test_the_t4():
    card = find_gpu("T4")
    assert card.total_memory == 14912 * MiB
    assert card.context == int(140.875 * MiB)
    assert card.workspace == 8_519_680
    assert "bfloat16" not in card.native_dtypes


def test_rules_by_capability():
    assert cublas_workspace((8, 9)) == 8_519_680
    for newer in ((9, 0), (10, 0), (10, 3), (12, 0), (12, 1)):
        assert cublas_workspace(newer) == 32 * MiB
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
        ("H100 SXM5", "H100"),
        ("h100pcie", "H100-PCIe"),
        ("H100 PCIe 80GB", "H100-PCIe"),
        ("H100-NVL", "H100-NVL"),
        ("V100 32GB", "V100-32GB"),
        ("v100-32", "V100-32GB"),
        ("A10", "A10"),
        ("L40", "L40"),
        ("A100 40GB PCIe", "A100-40GB"),
        ("gh200", "GH200"),
        ("B200 180GB", "B200"),
        ("GB10 DGX Spark", "GB10"),
        ("RTX 3060", "RTX-3060"),
        ("3060 12GB", "RTX-3060"),
        ("rtx3060", "RTX-3060"),
        ("RTX 3060 Ti", "RTX-3060-Ti"),
        ("3080", "RTX-3080"),
        ("RTX 3080 Ti", "RTX-3080-Ti"),
        ("1080ti", "GTX-1080-Ti"),
        ("2080 Ti", "RTX-2080-Ti"),
        ("4060 Ti 16GB", "RTX-4060-Ti-16GB"),
        ("rtx 4060 ti 8 gb", "RTX-4060-Ti-8GB"),
        ("5060 Ti 16GB", "RTX-5060-Ti-16GB"),
        ("4070", "RTX-4070"),
        ("4070 Super", "RTX-4070-Super"),
        ("4070 Ti", "RTX-4070-Ti"),
        ("RTX 4070 Ti Super", "RTX-4070-Ti-Super"),
        ("rtx4070tisuper", "RTX-4070-Ti-Super"),
        ("4080", "RTX-4080"),
        ("RTX 4080 SUPER", "RTX-4080-Super"),
        ("5090", "RTX-5090"),
        ("A6000", "RTX-A6000"),
        ("rtx a6000 48gb", "RTX-A6000"),
        ("RTX 6000 Ada", "RTX-6000-Ada"),
        ("RTX PRO 6000", "RTX-PRO-6000"),
        ("rtxpro6000", "RTX-PRO-6000"),
        ("RTX PRO 6000 Blackwell Max-Q", "RTX-PRO-6000"),
        ("colab T4", "T4"),
        ("Quadro RTX 6000", "Quadro-RTX-6000"),
        ("Quadro RTX 8000", "RTX-8000"),
        ("TITAN RTX", "TITAN-RTX"),
        ("NVIDIA TITAN Xp", "TITAN-Xp"),
        ("RTX 4090D", "RTX-4090-D"),
        ("GTX 1060 6GB", "GTX-1060"),
        ("NVIDIA GeForce RTX 2070 SUPER", "RTX-2070-Super"),
        ("3080 12GB", "RTX-3080-12GB"),
        ("A800-SXM4-80GB", "A800"),
        ("GB300 Grace", "GB300"),
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


@pytest.mark.parametrize(
    ("given", "size", "read"),
    [
        (16, 16 * 2**30, "(16 taken as GiB)"),
        ("16", 16 * 2**30, "(16 taken as GiB)"),
        ("11.5", 11.5 * 2**30, "(11.5 taken as GiB)"),
        (0.5, 2**29, "(0.5 taken as GiB)"),
        ("22 GiB", 22 * 2**30, " MiB"),
        ("22gib", 22 * 2**30, " MiB"),
        ("16,384 MiB", 2**34, " MiB"),
        (f"{2**34}", 2**34, " MiB"),
        ("24GB", GPUS["L4"].usable, "(of 24 GB; what L4, the least of these, leaves)"),
        ("20 gb", GPUS["RTX-4000-Ada"].usable, "(of 20 GB; what RTX-4000-Ada, "),
        ("15GB", 15e9, "(15 GB of 10^9 bytes; no card "),
    ],
)
def test_a_size_is_read_as_people_write_it_and_its_name_says_how(given, size, read):
    card = find_gpu(given)
    assert card.total_memory == card.usable == size and card.context == 0
    assert card.name.startswith(f"{size / MiB:,.0f} MiB") and read in card.name


def test_a_number_that_is_a_cards_is_that_card():
    assert find_gpu(4090) is GPUS["RTX-4090"]


def test_no_card_is_one_without_a_limit():
    card = find_gpu(None)
    assert card.usable is card.total_memory is card.context is None
    assert card.workspace == cublas_workspace((8, 0))


def test_a_card_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        find_gpu("T4").total_memory = 1


@pytest.mark.parametrize("name", GPUS)
def test_every_name_means_its_own_card_however_it_is_written(name):
    spaced = name.replace("-", " ")
    splits = name.startswith(("RTX", "H")) and not re.search(r"\d-\d", name)  # not V10032GB
    glued = name.replace("-", "") if splits else name
    for written in (name.lower(), spaced, spaced.upper(), glued, "NVIDIA " + name):
        assert find_gpu(written) is GPUS[name]
        assert gpu_of_device(written) is GPUS[name]
    assert find_gpu(f"{spaced} {GPUS[name].label} GB") is GPUS[name]


@pytest.mark.parametrize(
    "wrong",
    ["T5", "", "RTX", "H100 40", "H200 NVL", "A100 MIG 1g.5gb", "9" * 40, "-5", "0", "0.1 bytes"]
    + [0, -1, 2**51, float("nan"), float("inf"), True, [1]],
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
        ("A100", "'A100', which may be A100-40GB or A100-80GB: name one, or the GiB"),
        ("nvidia a100", "which may be A100-40GB or A100-80GB: name"),
        ("4060 Ti", "which may be RTX-4060-Ti-8GB or RTX-4060-Ti-16GB: name"),
        ("RTX 5060 Ti", "which may be RTX-5060-Ti-8GB or RTX-5060-Ti-16GB: name"),
        ("RTX 6000", "which may be Quadro-RTX-6000 or RTX-6000-Ada or RTX-PRO-6000: name"),
        ("TITAN", "which may be TITAN-Xp or TITAN-V or TITAN-RTX: name"),
        ("DGX Spark", "which may be GB10: name"),
        ("RTX 409", "the nearest is RTX-4090: allowed"),
        ("H10O", "the nearest is H100: allowed"),
        ("something else", "'something else': allowed"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", "a laptop's"),
        ("3080 mobile", "a laptop's"),
        ("Jetson AGX Orin", "a Jetson's"),
        ("2x4090", r"2 cards: name one, RTX-4090, and how many as ranks .--ranks 2.$"),
        ("8xH100", "8 cards: name one, H100, "),
        ("8 x A100", "8 cards: name one, A100-40GB or A100-80GB, "),
        ("T4x2", "2 cards: name one, T4, "),
        ("4090x2", "2 cards: name one, RTX-4090, "),
        ("H100:8", "8 cards: name one, H100, "),
        ("g5.xlarge", "a machine with A10G: name the card"),
        ("a2-ultragpu-1g", "a machine with A100-80GB: name the card"),
    ],
)
def test_what_an_unknown_name_may_mean(wrong, hint):
    with pytest.raises(ValueError, match=hint) as error:
        find_gpu(wrong)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "wrong", ["RTX 9070", "A1000", "RTX A3000", "RTX PRO 2000", "K80", "V800", "A900", "RTX 609"]
)
def test_of_another_generation_no_card_is_near(wrong):
    with pytest.raises(ValueError, match="gpu is '[^']*': allowed are"):
        find_gpu(wrong)


@pytest.mark.parametrize(
    ("wrong", "maker"),
    [
        ("MI250", "AMD"),
        ("MI300X", "AMD"),
        ("AMD Instinct MI355X", "AMD"),
        ("RX 7900 XTX", "AMD"),
        ("Arc A770", "Intel"),
        ("Gaudi 3", "Intel"),
        ("Gaudi2", "Intel"),
        ("M1", "Apple"),
        ("Apple M4 Max", "Apple"),
        ("mps", "Apple"),
        ("TPU v5e", "Google"),
    ],
)
def test_a_card_that_runs_no_cuda_is_refused_with_the_reason(wrong, maker):
    with pytest.raises(ValueError, match=f"'{wrong}', which is {maker}'s: .* of CUDA$") as error:
        find_gpu(wrong)
    assert "\n" not in str(error.value)
    assert gpu_of_device(wrong) is None


# A few of what zzc0721/torch-performance-test-data prints of its products, 10^12 a second.
REACHED = {
    ("V100", "float16"): 94.8,
    ("H200", "bfloat16"): 790.3,
    ("RTX-3090", "float32"): 24.8,
    ("RTX-4090", "bfloat16"): 164.8,
    ("L40S", "float32"): 46.9,
}


def test_what_was_measured_is_near_the_data_sheet_and_has_a_source():
    for (name, dtype), tera in REACHED.items():
        assert GPUS[name].reached(dtype) == (tera * 1e12,) * 3
    for card in GPUS.values():
        assert bool(card.measured) == bool(card.measured_source), card.name
        for dtype, (least, expected, most) in card.measured.items():
            assert least <= expected <= most
            # The T4 and the L4 of 70 W are slowest; GeForce cards clock above their data sheet.
            assert 0.3 < expected / card.rates[dtype] < 1.2, (card.name, dtype)


def test_a_card_that_was_measured_here_reaches_what_others_measured():
    """The best of squares of 4,096 and 8,192: an NVIDIA H100 80GB HBM3, PyTorch 2.11.0."""
    here = {"bfloat16": 777.2e12, "float16": 744.2e12, "tf32": 389.1e12, "float32": 51.5e12}
    for dtype, reached in here.items():
        assert GPUS["H100"].reached(dtype)[1] == pytest.approx(reached, rel=0.05), dtype
    # Bytes a second of tensors of 1 GiB: softmax, layer norm, GELU, a copy.
    kernels = 1293e9, 2036e9, 2876e9, 3009e9
    assert min(kernels) < GPUS["H100"].traffic < max(kernels) < GPUS["H100"].bandwidth


def test_a_card_without_measurements_reaches_what_cards_like_it_do():
    own, like = GPUS["RTX-6000-Ada"], GPUS["L40S"]
    assert not own.measured
    share = like.measured["float16"][1] / like.rates["float16"]
    assert own.reached("float16") == pytest.approx((share * own.rates["float16"],) * 3)
    least, expected, most = GPUS["RTX-4070"].reached("bfloat16")  # like other GeForce cards
    assert 0.9 < least / 58.2e12 <= expected / 58.2e12 <= most / 58.2e12 < 1.2
    ada, h100 = GPUS["RTX-4090"], GPUS["H100"]
    assert ada.reached("int8")[1] == pytest.approx(ada.rates["int8"], rel=0.05)  # as its bf16
    assert h100.reached("tf32") == (402.1e12,) * 3 and GPUS["T4"].reached("bfloat16") is None
    assert GPUS["T4"].reached("tf32") == GPUS["T4"].reached("float32")
    assert GPUS["H100"].traffic / GPUS["H100"].bandwidth == 0.72  # the median of those measured


def test_a_card_of_ones_own_has_seconds_by_rates_and_bandwidth():
    own = dataclasses.replace(
        find_gpu("22 GiB"),
        capability=(8, 9),
        processors=60,
        bandwidth=500e9,
        rates={"float32": 40e12, "bfloat16": 80e12},
    )
    assert find_gpu(own) is own
    recipe = Recipe("llama-3-8b", precision="bf16-amp", attention="sdpa", lora_rank=8)
    seconds = formula(recipe, own).step_time.expected
    quick = dataclasses.replace(own, bandwidth=1e12, rates={n: 2 * r for n, r in own.rates.items()})
    assert 0.5 < formula(recipe, quick).step_time.expected / seconds < 0.7


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
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H100 96GB HBM2e", "H100"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB10", "GB10"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A30", "A30"),
        ("NVIDIA A40", "A40"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("Tesla V100-PCIE-32GB", "V100-32GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("Quadro RTX 8000", "RTX-8000"),
        ("NVIDIA RTX A4000", "RTX-A4000"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA RTX 5000 Ada Generation", "RTX-5000-Ada"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX-PRO-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA GeForce GTX 1080 Ti", "GTX-1080-Ti"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX-2080-Ti"),
        ("NVIDIA GeForce RTX 3060", "RTX-3060"),
        ("NVIDIA GeForce RTX 4070", "RTX-4070"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX-4070-Ti-Super"),
        ("NVIDIA GeForce RTX 4080 SUPER", "RTX-4080-Super"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
    ],
)
def test_the_card_that_a_driver_means(device, name):
    assert gpu_of_device(device) is GPUS[name]


@pytest.mark.parametrize(
    "device",
    [
        "CPU (x86_64, 2 threads)",
        "",
        "Tesla K80",
        "NVIDIA H200 NVL",
        "NVIDIA H20-3e",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "Quadro RTX 4000",
        "NVIDIA TITAN X (Pascal)",
        "NVIDIA GeForce RTX 4060 Ti",  # of 8 or of 16 GB
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA GeForce RTX 4070 Laptop GPU",
        "NVIDIA GeForce RTX 2080 Super with Max-Q Design",
        "NVIDIA RTX A5000 Laptop GPU",
        "AMD Instinct MI300X",
    ],
)
def test_a_device_that_is_no_known_card(device):
    assert gpu_of_device(device) is None
