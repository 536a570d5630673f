"""Cards: figures in a sane relation to each other and to published messages; bad input."""

import dataclasses
import json
import re
from importlib.resources import files

import pytest
from helpers import refused

from memlab import Recipe, simulate
from memlab.gpus import GPUS, find_gpu, gpu_of_device
from memlab.units import MiB

# "GPU 0 has a total capacity of ... GiB", as PyTorch 2 printed it in the threads that the records
# name; of other cards what another program printed as the driver's total, in MiB, is below.
PRINTED_GIB = {
    "T4": "14.56",
    "V100": "15.77",
    "A100-80GB": "79.25",
    "H100": "79.18",
    "RTX-3090": "23.56",
    "RTX-4090": "23.64",
}


FILE = json.loads(files("memlab.data").joinpath("gpus.json").read_text(encoding="utf-8"))
# CUDA Programming Guide, appendix "Compute Capabilities": formats of products at full speed, each
# from a compute capability on.
FORMATS = {"float32": (0, 0), "float16": (5, 3), "int8": (7, 5), "bfloat16": (8, 0), "tf32": (8, 0)}
FORMATS |= {"float8_e4m3fn": (8, 9), "float8_e5m2": (8, 9), "float4_e2m1fn": (10, 0)}
# The compute capability of each class of cards: NVIDIA's table "CUDA GPU compute capability".
CAPABILITIES = {
    "(GTX-10|P40|TITAN-Xp)": (6, 1),
    "(V100|TITAN-V)": (7, 0),
    "(T4|GTX-16|RTX-20[678]|RTX-8000|Quadro|TITAN-RTX)": (7, 5),
    "(A100|A800|A30)": (8, 0),
    "(RTX-30[5-9]|RTX-A|A10G?$|A2$|A40)": (8, 6),
    "(RTX-40[5-9]|RTX-.*-Ada|L)": (8, 9),
    "(H|GH)": (9, 0),
    "(B200|GB200)": (10, 0),
    "(RTX-50[5-9]|RTX-PRO)": (12, 0),
}


def test_rates_are_those_that_others_keep():
    """By TRL's table, which follows torchtitan's, and takes an A10G for an A10."""
    known = pytest.importorskip("trl.trainer.utils").get_peak_flops
    for card in GPUS.values():
        dtype = "bfloat16" if "bfloat16" in card.rates else "float16"
        rate = known(card.name.replace("-", " "), dtype)
        if rate and card.name != "A10G":
            assert card.rates[dtype] == pytest.approx(rate, rel=0.01), card.name


@pytest.mark.parametrize("name", GPUS)
def test_a_card_has_the_formats_of_its_class_and_most_of_the_memory_on_its_label(name):
    card = GPUS[name]
    formats = {name for name, least in FORMATS.items() if card.capability >= least}
    assert set(card.rates) <= formats | {"int8"}  # the P40 has int8 before others
    assert formats <= set(card.rates) and set(card.native_dtypes) <= formats
    assert ("bfloat16" in card.rates) == (card.capability >= (8, 0))
    assert ("float8_e4m3fn" in card.rates) == (card.capability >= (8, 9))
    assert ("float4_e2m1fn" in card.rates) == (card.capability >= (10, 0))
    assert 0.9 * card.label * 2**30 < card.total_memory < card.label * 2**30


@pytest.mark.parametrize(("names", "capability"), CAPABILITIES.items())
def test_cards_of_a_class_have_its_compute_capability(names, capability):
    cards = [card for card in GPUS.values() if re.match(rf"{names}(?![a-z])", card.name)]
    assert {card.capability for card in cards} == {capability}


@pytest.mark.parametrize("name", PRINTED_GIB)
def test_total_memory_prints_as_pytorch_printed_it(name):
    assert f"{GPUS[name].total_memory / 2**30:.2f}" == PRINTED_GIB[name]


def test_every_card_has_sources_and_a_context_of_a_lazily_loaded_pytorch():
    for card in GPUS.values():
        assert "total" in card.sources
        assert "context" in card.sources
        assert 100 * MiB < card.context < 800 * MiB
        assert FILE[card.name]["rates_source"]
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


def test_rules_by_capability():
    assert find_gpu("L4").workspace == 8_519_680
    assert find_gpu("H200").workspace == find_gpu("RTX-5090").workspace == 32 * MiB
    native = {name for name, card in GPUS.items() if "bfloat16" in card.native_dtypes}
    assert "T4" not in native and {"A30", "L4", "H100"} <= native


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("a100_80gb", "A100-80GB"),
        (" h200 ", "H200"),
        ("4090", "RTX-4090"),
        ("A100-80", "A100-80GB"),
        ("a100 40 gb", "A100-40GB"),
        ("H100 SXM5", "H100"),
        ("v100-32", "V100-32GB"),
        ("B200 180GB", "B200"),
        ("GB10 DGX Spark", "GB10"),
        ("3060 12GB", "RTX-3060"),
        ("3080", "RTX-3080"),
        ("1080ti", "GTX-1080-Ti"),
        ("rtx 4060 ti 8 gb", "RTX-4060-Ti-8GB"),
        ("A6000", "RTX-A6000"),
        ("RTX PRO 6000 Blackwell Max-Q", "RTX-PRO-6000"),
        ("colab T4", "T4"),
        ("RTX 4090D", "RTX-4090-D"),
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
        ("1,024.5 MiB", 1024.5 * MiB, " MiB"),
        (f"{2**34}", 2**34, " MiB"),
        ("24GB", GPUS["L4"].usable, "(of 24 GB; usable on L4, the smallest of these)"),
        ("20 gb", GPUS["RTX-4000-Ada"].usable, "(of 20 GB; usable on RTX-4000-Ada, "),
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
    assert card.workspace == 8_519_680


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
    [
        "T5",
        "",
        "RTX",
        "11,5 GiB",
        "1,2345 MiB",
        "H100 40",
        "H200 NVL",
        "A100 MIG 1g.5gb",
        "9" * 40,
        "-5",
        "0",
        "0.1 bytes",
    ]
    + [0, -1, 2**51, float("nan"), float("inf"), True, [1]],
)
def test_what_is_no_card(wrong):
    with refused(repr(wrong), "T4, P100"):
        find_gpu(wrong)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("A100", "'A100', which may be A100-40GB or A100-80GB: name one, or the GiB"),
        ("RTX 5060 Ti", "which may be RTX-5060-Ti-8GB or RTX-5060-Ti-16GB: name"),
        ("RTX 6000", "which may be Quadro-RTX-6000 or RTX-6000-Ada or RTX-PRO-6000: name"),
        ("DGX Spark", "which may be GB10: name"),
        ("RTX 409", "the nearest is RTX-4090: allowed"),
        ("something else", "'something else': allowed"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", "a laptop chip"),
        ("3080 mobile", "a laptop chip"),
        ("Jetson AGX Orin", "a Jetson chip"),
        ("2x4090", r"2 cards: name one, RTX-4090, and the number as ranks .--ranks 2.$"),
        ("8 x A100", "8 cards: name one, A100-40GB or A100-80GB, "),
        ("T4x2", "2 cards: name one, T4, "),
        ("H100:8", "8 cards: name one, H100, "),
        ("g5.xlarge", "a machine with A10G: name the card"),
    ],
)
def test_what_an_unknown_name_may_mean(wrong, hint):
    with refused(hint):
        find_gpu(wrong)


@pytest.mark.parametrize(
    "wrong", ["RTX 9070", "A1000", "RTX A3000", "RTX PRO 2000", "K80", "V800", "A900", "RTX 609"]
)
def test_of_another_generation_no_card_is_near(wrong):
    with refused("gpu is '[^']*': allowed are"):
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
    with refused(f"'{wrong}', which is {maker}'s: .* of CUDA$"):
        find_gpu(wrong)
    assert gpu_of_device(wrong) is None


def test_what_was_measured_is_near_the_data_sheet_and_has_a_source():
    for card in GPUS.values():
        assert bool(card.measured) == bool(FILE[card.name].get("measured_source")), card.name
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
    assert GPUS["T4"].reached("bfloat16") is None
    assert GPUS["T4"].reached("tf32") == GPUS["T4"].reached("float32")


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
    seconds = simulate(recipe, own.without_limit()).step_time.expected
    quick = dataclasses.replace(own, bandwidth=1e12, rates={n: 2 * r for n, r in own.rates.items()})
    assert 0.5 < simulate(recipe, quick.without_limit()).step_time.expected / seconds < 0.7


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 96GB HBM2e", "H100"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("Tesla V100-PCIE-32GB", "V100-32GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("Quadro RTX 8000", "RTX-8000"),
        ("NVIDIA RTX A4000", "RTX-A4000"),
        ("NVIDIA RTX 5000 Ada Generation", "RTX-5000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX-PRO-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX-4070-Ti-Super"),
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
