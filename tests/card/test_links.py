"""How fast ranks send, inside a machine and between machines."""

import pytest

from memlab import Recipe
from memlab.card.links import LINKS, host_rate, link_rate, links_of
from memlab.card.step_time import step_time
from memlab.gpus import ANY_CARD, GPUS, find_gpu
from memlab.predict.simulate import full_log


@pytest.mark.parametrize(
    ("card", "link", "gigabytes"),
    [
        ("H100", "infiniband-400", 400),  # eight ports of 50, and NVLink is faster
        ("A100-80GB", "infiniband-400", 300),  # NVLink, which the ring runs through inside
        ("T4", "infiniband-400", 15.75),  # PCIe inside
        ("H100", "ethernet-100", 12.5),  # one port a machine
        ("T4", "ethernet-10", 1.25),
        ("H100", None, 450),
        ("L4", None, 31.5),
    ],
)
def test_a_ring_is_as_fast_as_its_slowest_stretch(card, link, gigabytes):
    assert link_rate(find_gpu(card), link) == gigabytes * 1e9


@pytest.mark.parametrize(
    ("link", "cards", "gigabytes"),
    [
        ("infiniband-400", 8, 400),
        ("infiniband-400", 1, 50),  # each card its own port
        ("ethernet-100", 2, 3.125),  # a quarter of the one port
        ("ethernet-100", 0, 450),  # inside, where it is not used
        ("pcie", 0, 63.02),  # which was asked for
    ],
)
def test_a_group_has_its_cards_part_of_the_ports(link, cards, gigabytes):
    assert link_rate(find_gpu("H100"), link, cards) == pytest.approx(gigabytes * 1e9, rel=0.001)


# Of 25 GB/s each; the B cards have 18 of twice as much.
NVLINKS = {"V100": 6, "V100-32GB": 6, "A100-40GB": 12, "A100-80GB": 12, "H100-NVL": 12}
NVLINKS |= dict.fromkeys(("H100", "H200", "H20", "GH200"), 18)
NVLINKS |= dict.fromkeys(("B200", "B300", "GB200", "GB300"), 36)
NVLINKS |= dict.fromkeys(("A800", "H800"), 8)
PCIE = {  # generations; the others are of the 4th
    3: {"T4", "P100", "P40", "V100", "V100-32GB", "RTX-8000"}
    | {name for name in GPUS if name.startswith(("GTX-1", "RTX-20", "Quadro-RTX", "TITAN"))}
    - {"RTX-2000-Ada"},
    5: {"H100", "H100-PCIe", "H100-NVL", "H200", "H20", "GH200", "B200", "GB10", "H800", "GB200"}
    | {name for name in GPUS if name.startswith(("RTX-PRO", "RTX-50")) and "Ada" not in name},
    6: {"B300", "GB300"},
}
LANES = dict.fromkeys(("RTX-4060", "RTX-4060-Ti-8GB", "RTX-4060-Ti-16GB", "RTX-5060-Ti-16GB"), 8)
LANES |= dict.fromkeys(("RTX-5050", "RTX-5060", "RTX-5060-Ti-8GB", "RTX-3050", "RTX-2000-Ada"), 8)
LANES |= {"A2": 8, "GB10": 4}  # the others have 16


@pytest.mark.parametrize("card", GPUS)
def test_rates_are_those_of_lanes_and_links(card):
    """PCIe: lanes of 8 GT/s in generation 3, twice as many in each, 128 of 130 bits are data."""
    generation = next((g for g, names in PCIE.items() if card in names), 4)
    lanes = LANES.get(card, 16) * 2 ** (generation - 3) * 128 / 130
    assert host_rate(GPUS[card]) == pytest.approx(lanes * 1e9, rel=0.001)
    geforce = card.startswith(("RTX-20", "RTX-30", "RTX-40", "RTX-5")) and "Ada" not in card
    between = lanes * (0.48 if geforce else 1)
    assert link_rate(GPUS[card], "pcie") == pytest.approx(between * 1e9, rel=0.001)
    if card in NVLINKS:
        assert link_rate(GPUS[card], "nvlink") == NVLINKS[card] * 25e9
    assert ("nvlink" in links_of(GPUS[card])) == (card in NVLINKS)


def test_ports_are_as_fast_as_their_names():
    for name, ports in (("infiniband-400", 8), ("ethernet-100", 1), ("ethernet-10", 1)):
        gigabits = int(name.partition("-")[2])
        assert LINKS[name]["gb_per_second_of_port"] == gigabits / 8
        assert LINKS[name]["ports"] == ports


def test_slow_and_fast_links_of_a_large_training():
    """64 cards with a port each send behind the computing; with a port a machine they wait."""
    recipe = Recipe(
        "llama-2-70b", seq_len=4096, precision="bf16-amp", attention="sdpa", checkpointing=True,
        ranks=64, sharding="zero3",
    )  # fmt: skip
    card = find_gpu("H100")
    work = full_log(recipe, card).work
    waiting = {
        link: step_time(work, card, 1, link).parts["communication"]
        for link in ("nvlink", "infiniband-400", "ethernet-100")
    }
    assert waiting["infiniband-400"] == waiting["nvlink"] < 0.1 < waiting["ethernet-100"]


def test_every_card_has_the_links_between_machines():
    between = [name for name, said in LINKS.items() if "ports" in said]
    assert between == ["infiniband-400", "ethernet-100", "ethernet-10"]
    assert all(links_of(card)[-len(between) :] == between for card in GPUS.values())
    assert links_of(ANY_CARD) == between


def test_what_a_card_does_not_have_is_refused():
    with pytest.raises(ValueError, match="for L4 pcie, infiniband-400"):
        link_rate(find_gpu("L4"), "nvlink")
    with pytest.raises(ValueError, match="nvlink, pcie"):
        link_rate(find_gpu("L4"), "infiniband")
