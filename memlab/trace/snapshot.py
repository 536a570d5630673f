"""Export of a ledger as a PyTorch memory snapshot, which pytorch.org/memory_viz opens.

The format is documented at `torch.cuda.memory._snapshot`, and `torch.cuda._memory_viz` reads it,
too. Addresses are simulated, and `time_us` counts actions.

Known limitation: every segment and action is shown on stream 0.
"""

from typing import Any

from memlab.trace.allocator import CachingAllocator
from memlab.trace.allocator_blocks import Block
from memlab.trace.ledger import Ledger, Storage


def take_snapshot(ledger: Ledger) -> dict:
    """The current segments, and every action of the allocator since the ledger was made.

    In place of a Python stack, the frames of an allocation are the operation that made it, the path
    of its module, and its category. Raises ValueError for a ledger without an allocator.
    """
    if ledger.allocator is None:
        raise ValueError("a snapshot needs a ledger with an allocator")
    return {
        "segments": _segments(ledger, ledger.allocator),
        "device_traces": [_trace(ledger, ledger.allocator)],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _segments(ledger: Ledger, allocator: CachingAllocator) -> list[dict]:
    owners = {s.address: s for s in ledger.storages if s.address is not None}
    segments = []
    for head in sorted(allocator.blocks.values(), key=lambda block: block.address):
        # As in `DeviceCachingAllocator::snapshot` (c10/cuda/CUDACachingAllocator.cpp), each mapped
        # range of an expandable segment counts as a segment.
        if not head.is_mapped or head.before is not None and head.before.is_mapped:
            continue
        blocks: list[dict] = []
        block: Block | None = head
        while block is not None and block.is_mapped:
            blocks.append(
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested,
                    "state": "inactive" if block.free else "active_allocated",
                    "frames": [] if block.free else _frames(owners[block.address]),
                }
            )
            block = block.after
        allocated = sum(b["size"] for b in blocks if b["state"] == "active_allocated")
        segments.append(
            {
                "device": 0,
                "address": head.address,
                "total_size": sum(block["size"] for block in blocks),
                "allocated_size": allocated,
                "active_size": allocated,
                "requested_size": sum(block["requested_size"] for block in blocks),
                "stream": 0,
                "segment_type": "small" if head.small else "large",
                "segment_pool_id": (0, 0),
                "is_expandable": head.is_expandable,
                "frames": [],
                "blocks": blocks,
            }
        )
    return segments


def _trace(ledger: Ledger, allocator: CachingAllocator) -> list[dict]:
    entries: list[dict] = []
    owners: dict[int, Storage] = {}
    allocated = iter(ledger.storages)  # one for each `alloc` of the trace, in the same order

    def add(action: str, address: int, nbytes: int, frames: list[dict], **more: Any) -> None:
        place = {"device_free": address} if action == "oom" else {"addr": address}
        entries.append(
            {"action": action, "size": nbytes, "stream": 0, "frames": frames} | place | more
            | {"time_us": len(entries), "pool_id": (0, 0)}
        )  # fmt: skip

    for action, address, nbytes in allocator.trace:
        if action == "alloc":
            owners[address] = storage = next(allocated)
            add(action, address, nbytes, _frames(storage), category=str(storage.category))
        elif action == "free":
            # PyTorch logs both. They differ only while another stream still uses the block.
            frames = _frames(owners.pop(address))
            add("free_requested", address, nbytes, frames)
            add("free_completed", address, nbytes, frames)
        else:
            add(action, address, nbytes, [])
    return entries


def _frames(storage: Storage) -> list[dict]:
    """The frames of an allocation, the innermost first, as in a stack."""
    names = (
        ("operation", storage.operation),
        ("module", storage.module),
        ("category", storage.category),
    )
    return [{"filename": kind, "line": 0, "name": str(name)} for kind, name in names]
