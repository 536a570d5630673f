"""How fast the links between ranks are.

A link is one inside a machine (NVLink, PCIe), or between machines of eight cards (InfiniBand,
Ethernet). NCCL's rings run through all cards of a machine over the link inside, and leave the
machine once each; as many rings as it has ports share the bytes. So a collective takes the longer
of what the cards pass on inside and what the ports pass on together: NVIDIA/nccl#495 has eight
ports of 100 Gbit/s at 600 Gbit/s a ring, where one would give 100; NVIDIA/nccl-tests#119 counts
the same way. Where a group has some of a machine's cards alone, as the copies of a split model do,
it has as large a part of the ports. GeForce cards do not reach each other over PCIe: what they send
goes by way of the host's memory, at the share of the rate that links.json has with its source.
"""

import json
import math
from pathlib import Path

from memlab.fields import invalid_value
from memlab.gpus import GPU
from memlab.trace.work import CARDS

_FILE = Path(__file__).parent.parent / "data" / "links.json"
# name -> {"gb_per_second": card -> number, "source": where it is written down}; of a link between
# machines also "gb_per_second_of_port" and "ports", how many a machine of eight cards has; of PCIe
# "through_host", the cards that do not reach each other, and "share_through_host".
LINKS: dict[str, dict] = json.loads(_FILE.read_text(encoding="utf-8"))


def link_rate(gpu: GPU, link: str | None = None, cards: int = CARDS) -> float:
    """Bytes per second that a rank sends over a link, in one direction, while all ranks send.

    link: a name of `LINKS`; None takes NVLink where the card has it, and else PCIe. One between
    machines (`infiniband-400`, with eight ports a machine of eight cards; `ethernet-100` and
    `ethernet-10`, with one) is as fast as the ports together, and no faster than the link inside.
    cards: how many of a machine's cards are in a group that sends; 0 for a group of one machine,
    which has no use for a link between them.

    Raises ValueError for another name, and for a link that the card does not have.
    """
    if link is None or (cards == 0 and "ports" in LINKS.get(link, ())):
        link = _inside(gpu)
    if link not in LINKS:
        raise invalid_value("link", link, ", ".join(LINKS))
    if link not in links_of(gpu):
        raise invalid_value("link", link, f"for {gpu.name} {', '.join(links_of(gpu))}")
    return _gb_per_second(gpu.name, link, cards) * 1e9


def host_rate(gpu: GPU) -> float:
    """Bytes per second between a card and the host's memory, in one direction, over PCIe.

    Raises ValueError for a card whose PCIe is not known.
    """
    if gpu.name not in LINKS["pcie"]["gb_per_second"]:
        raise invalid_value("link", "pcie", f"for {gpu.name} {', '.join(links_of(gpu))}")
    return LINKS["pcie"]["gb_per_second"][gpu.name] * 1e9


def links_of(gpu: GPU) -> list[str]:
    """The links whose rate is known for a card."""
    return [n for n, link in LINKS.items() if "ports" in link or gpu.name in link["gb_per_second"]]


def _inside(gpu: GPU) -> str:
    return "nvlink" if gpu.name in LINKS["nvlink"]["gb_per_second"] else "pcie"


def _gb_per_second(card: str, link: str, cards: int = CARDS) -> float:
    values = LINKS[link]
    if "ports" not in values:
        through_host = values.get("through_host", ())
        return values["gb_per_second"][card] * (
            values["share_through_host"] if card in through_host else 1
        )
    links = [name for name in ("nvlink", "pcie") if card in LINKS[name]["gb_per_second"]]
    inside = _gb_per_second(card, links[0]) if links else math.inf
    return min(values["ports"] * values["gb_per_second_of_port"] * cards / CARDS, inside)
