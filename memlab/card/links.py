"""How fast ranks send to each other, and a GPU to its host.

A link connects GPUs inside a machine (NVLink, PCIe), or machines of eight GPUs (InfiniBand,
Ethernet). NCCL's rings pass through all GPUs of a machine over the inner link, and each ring leaves
the machine once. As many rings as the machine has network ports share the bytes. The rate of a
collective is therefore the lower of two: that of the inner link, and that of all ports together.
NVIDIA/nccl#495 shows eight ports of 100 Gbit/s at 600 Gbit/s per ring, where one port would give
100; NVIDIA/nccl-tests#119 counts the same way. A group that has only some of a machine's GPUs, such
as the replicas of a split model, gets the same share of the ports.

GeForce GPUs do not reach each other over PCIe. What they send passes through the host's memory, at
a share of the rate that data/links.json gives with its source.
"""

import json
import math
from pathlib import Path

from memlab.fields import invalid_value
from memlab.gpus import GPU
from memlab.trace.work import CARDS

_FILE = Path(__file__).parent.parent / "data" / "links.json"
# Link -> its entry. Every entry has "source". A link inside a machine has "gb_per_second", a number
# for each GPU that has the link, in one direction. A link between machines has
# "gb_per_second_of_port" and "ports", the ports of a machine of eight GPUs. The entry of PCIe also
# has "through_host", the GPUs that do not reach each other, and "share_through_host".
LINKS: dict[str, dict] = json.loads(_FILE.read_text(encoding="utf-8"))


def link_rate(gpu: GPU, link: str | None = None, cards: int = CARDS) -> float:
    """Bytes per second that a rank sends over a link, in one direction, while all ranks send.

    link: a name of `LINKS`; None means NVLink if the GPU has it, and PCIe otherwise. A link between
        machines is as fast as its ports together, and no faster than the link inside. A machine of
        eight GPUs has eight ports for `infiniband-400`, and one for `ethernet-100` and
        `ethernet-10`.
    cards: how many GPUs of a machine are in the group that sends; 0 for a group inside one machine,
        which does not use the link between machines.

    Raises ValueError for another name, and for a link that the GPU does not have.
    """
    if link is None or (cards == 0 and "ports" in LINKS.get(link, ())):
        link = _inside(gpu)
    if link not in LINKS:
        raise invalid_value("link", link, ", ".join(LINKS))
    if link not in links_of(gpu):
        raise invalid_value("link", link, f"{', '.join(links_of(gpu))} for {gpu.name}")
    return _gb_per_second(gpu.name, link, cards) * 1e9


def host_rate(gpu: GPU) -> float:
    """Bytes per second between a GPU and the host's memory, in one direction, over PCIe.

    Raises ValueError for a GPU whose PCIe rate is not known.
    """
    if gpu.name not in LINKS["pcie"]["gb_per_second"]:
        raise invalid_value("link", "pcie", f"{', '.join(links_of(gpu))} for {gpu.name}")
    return LINKS["pcie"]["gb_per_second"][gpu.name] * 1e9


def links_of(gpu: GPU) -> list[str]:
    """The names of the links that a GPU can use: those between machines, and its own."""
    return [n for n, link in LINKS.items() if "ports" in link or gpu.name in link["gb_per_second"]]


def _inside(gpu: GPU) -> str:
    return "nvlink" if gpu.name in LINKS["nvlink"]["gb_per_second"] else "pcie"


def _gb_per_second(card: str, link: str, cards: int = CARDS) -> float:
    values = LINKS[link]
    if "ports" not in values:  # a link inside a machine
        through_host = values.get("through_host", ())
        return values["gb_per_second"][card] * (
            values["share_through_host"] if card in through_host else 1
        )
    # A group of `cards` GPUs has that part of the ports. Inside, the fastest link is used.
    links = [name for name in ("nvlink", "pcie") if card in LINKS[name]["gb_per_second"]]
    inside = _gb_per_second(card, links[0]) if links else math.inf
    return min(values["ports"] * values["gb_per_second_of_port"] * cards / CARDS, inside)
