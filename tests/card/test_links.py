"""How fast ranks send, inside a machine and between machines."""

import pytest

from memlab.card.links import host_rate, link_rate, links_of
from memlab.card.step_time import step_time
from memlab.evidence.grid import recipe_of
from memlab.gpus import GPUS, find_gpu
from memlab.predict.simulate import full_log


@pytest.mark.parametrize(
    ("card", "link", "cards", "gigabytes"),
    [
        ("H100", "infiniband-400", 8, 400),  # eight ports of 50, and NVLink is faster
        ("A100-80GB", "infiniband-400", 8, 300),  # NVLink, which the ring runs through inside
        ("T4", "infiniband-400", 8, 15.75),  # PCIe inside
        ("H100", "ethernet-100", 8, 12.5),  # one port a machine
        ("T4", "ethernet-10", 8, 1.25),
        ("H100", None, 8, 450),
        ("L4", None, 8, 31.5),
        ("H100", "infiniband-400", 1, 50),  # each card its own port
        ("H100", "ethernet-100", 2, 3.125),  # a quarter of the one port
        ("H100", "ethernet-100", 0, 450),  # inside, where it is not used
        ("H100", "pcie", 0, 63.02),  # which was asked for
    ],
)
def test_a_ring_is_as_fast_as_its_slowest_stretch(card, link, cards, gigabytes):
    assert link_rate(find_gpu(card), link, cards) == pytest.approx(gigabytes * 1e9, rel=0.001)


@pytest.mark.parametrize("card", GPUS.values(), ids=GPUS)
def test_rates_are_of_whole_lanes_and_links(card):
    """PCIe: lanes of 8 GT/s in generation 3, twice as many in each, 128 of 130 bits are data."""
    lanes = [n * 2**more * 128 / 130 for n in (4, 8, 16) for more in range(4)]
    assert any(host_rate(card) == pytest.approx(rate * 1e9, rel=0.001) for rate in lanes)
    if "nvlink" in links_of(card):
        assert link_rate(card, "nvlink") % 25e9 == 0


def test_slow_and_fast_links_of_a_large_training():
    """64 cards with a port each send behind the computing; with a port a machine they wait."""
    recipe = recipe_of("llama-2-70b 1x4096 bf16-amp sdpa checkpointing ranks=64 zero3")
    card = find_gpu("H100")
    work = full_log(recipe, card).work
    waiting = {
        link: step_time(work, card, 1, link).parts["communication"]
        for link in ("nvlink", "infiniband-400", "ethernet-100")
    }
    assert waiting["infiniband-400"] == waiting["nvlink"] < 0.1 < waiting["ethernet-100"]
