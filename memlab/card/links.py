"""What ranks send each other, and how fast the link between them is.

A link is one inside a machine (NVLink, PCIe), or between machines of eight cards (InfiniBand,
Ethernet). NCCL's rings run through all cards of a machine over the link inside, and leave the
machine once each; as many rings as it has ports share the bytes. So a collective takes the longer
of what the cards pass on inside and what the ports pass on together: NVIDIA/nccl#495 has eight
ports of 100 Gbit/s at 600 Gbit/s a ring, where one would give 100; NVIDIA/nccl-tests#119 counts
the same way. GeForce cards do not reach each other over PCIe: what they send goes by way of the
host's memory, at the share of the rate that links.json has with its source.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch.distributed as dist

from memlab.fields import wrong
from memlab.gpus import GPU

_FILE = Path(__file__).parent.parent / "data" / "links.json"
# name -> {"gb_per_second": card -> number, "source": where it is written down}; of a link between
# machines also "gb_per_second_of_port" and "ports", how many a machine of eight cards has; of PCIe
# "through_host", the cards that do not reach each other, and "share_through_host".
LINKS: dict[str, dict] = json.loads(_FILE.read_text(encoding="utf-8"))


def link_rate(gpu: GPU, link: str | None = None) -> float:
    """Bytes a second that a rank sends over a link, in one direction, while all ranks send.

    link: a name of `LINKS`; None takes NVLink where the card has it, and else PCIe. One between
    machines (`infiniband-400`, with eight ports a machine of eight cards; `ethernet-100` and
    `ethernet-10`, with one) is as fast as the ports together, and no faster than the link inside.

    Raises ValueError for another name, and for a link that the card does not have.
    """
    if link is None:
        link = _inside(gpu)
    if link not in LINKS:
        raise wrong("link", link, ", ".join(LINKS))
    if link not in links_of(gpu):
        raise wrong("link", link, f"for {gpu.name} {', '.join(links_of(gpu))}")
    return _gb_per_second(gpu.name, link) * 1e9


def host_rate(gpu: GPU) -> float:
    """Bytes a second between a card and the host's memory, in one direction, over PCIe.

    Raises ValueError for a card whose PCIe is not known.
    """
    if gpu.name not in LINKS["pcie"]["gb_per_second"]:
        raise wrong("link", "pcie", f"for {gpu.name} {', '.join(links_of(gpu))}")
    return LINKS["pcie"]["gb_per_second"][gpu.name] * 1e9


def links_of(gpu: GPU) -> list[str]:
    """The links whose rate is known for a card."""
    return [n for n, said in LINKS.items() if "ports" in said or gpu.name in said["gb_per_second"]]


def _inside(gpu: GPU) -> str:
    return "nvlink" if gpu.name in LINKS["nvlink"]["gb_per_second"] else "pcie"


def _gb_per_second(card: str, link: str) -> float:
    said = LINKS[link]
    if "ports" not in said:
        alone = said.get("through_host", ())
        return said["gb_per_second"][card] * (said["share_through_host"] if card in alone else 1)
    known = [name for name in ("nvlink", "pcie") if card in LINKS[name]["gb_per_second"]]
    inside = _gb_per_second(card, known[0]) if known else math.inf
    return min(said["ports"] * said["gb_per_second_of_port"], inside)


# What each rank of n sends at least for every byte of the larger tensor: NVIDIA/nccl-tests,
# doc/PERFORMANCE.md, "Bus bandwidth", the same for a ring and for a tree.
SHARE = {
    "allreduce_": lambda n: 2 * (n - 1) / n,
    "allgather_": lambda n: (n - 1) / n,
    "_allgather_base_": lambda n: (n - 1) / n,
    "reduce_scatter_": lambda n: (n - 1) / n,
    "_reduce_scatter_base_": lambda n: (n - 1) / n,
    "alltoall_base_": lambda n: (n - 1) / n,
    "broadcast_": lambda n: 1.0,
}
SHARE |= {
    "all_reduce": SHARE["allreduce_"],
    "all_gather_into_tensor": SHARE["_allgather_base_"],
    "reduce_scatter_tensor": SHARE["_reduce_scatter_base_"],
    "all_to_all_single": SHARE["alltoall_base_"],
}


def sent_bytes(func, args, tensors, out) -> int | None:
    """Bytes that a rank sends in a collective; None for any other operator.

    tensors: all that it was given. out: what it gives, which a functional collective makes.
    """
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    if func._opname not in SHARE:  # a wait, a barrier
        return 0
    if func.namespace == "c10d":
        group = next(arg for arg in args if type(arg).__name__ == "ScriptObject")
        size = dist.ProcessGroup.unbox(group).size()
        largest = max(map(_bytes, tensors))
        if func._opname in ("allreduce_", "broadcast_"):  # each of a list is sent
            largest = sum(map(_bytes, tensors))
    else:
        group = next(arg for arg in reversed(args) if isinstance(arg, str))
        size = dist.distributed_c10d._resolve_process_group(group).size()
        largest = max(_bytes(tensor) for tensor in (*tensors, out))
    return round(largest * SHARE[func._opname](size))


def _bytes(tensor) -> int:
    return tensor.numel() * tensor.itemsize
