"""The export, read by PyTorch's own functions for memory snapshots."""

import pickle
import re

import pytest
import torch
from torch.cuda import _memory_viz as viz

from memlab import MiB, Recipe, SimulatedGPU
from memlab.trace.ledger import Ledger
from memlab.trace.snapshot import take_snapshot
from memlab.workloads.training import Training


@pytest.fixture(scope="module")
def run():
    recipe = Recipe(model="bert-large-tiny", batch_size=4, seq_len=64, checkpointing=True)
    with SimulatedGPU("T4") as gpu:
        training = Training(recipe, "cuda")
        training.step()
        torch.cuda.empty_cache()
        training.step()
        figures = {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "requested": torch.cuda.memory_stats()["requested_bytes.all.current"],
            "most requested": torch.cuda.memory_stats()["requested_bytes.all.peak"],
            "most reserved": torch.cuda.max_memory_reserved(),
        }
        return gpu.snapshot(), figures, gpu


def test_segments_hold_what_the_counters_say(run):
    snapshot, figures, _ = run
    segments = snapshot["segments"]
    assert sum(segment["total_size"] for segment in segments) == figures["reserved"]
    assert sum(segment["allocated_size"] for segment in segments) == figures["allocated"]
    assert sum(viz.calc_active(segment) for segment in segments) == figures["allocated"]
    for segment in segments:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        places = [block["address"] for block in segment["blocks"]]
        assert places[0] == segment["address"] and places == sorted(places)


def test_the_trace_read_again_gives_peak_and_reserved(run):
    snapshot, figures, _ = run
    held, most, reserved, most_reserved, live = 0, 0, 0, 0, {}
    for entry in snapshot["device_traces"][0]:
        if entry["action"] == "alloc":
            assert entry["addr"] not in live
            live[entry["addr"]] = entry["size"]
            held += entry["size"]
            most = max(most, held)
        elif entry["action"] == "free_completed":
            assert live.pop(entry["addr"]) == entry["size"]
            held -= entry["size"]
        elif entry["action"] == "segment_alloc":
            reserved += entry["size"]
            most_reserved = max(most_reserved, reserved)
        elif entry["action"] == "segment_free":
            reserved -= entry["size"]
    assert (held, reserved) == (figures["requested"], figures["reserved"])
    assert (most, most_reserved) == (figures["most requested"], figures["most reserved"])
    active = {
        block["address"]: block["requested_size"]
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    assert active == live


def test_pytorchs_plots_and_listings_take_it(run):
    snapshot, _, _ = run
    for page in (viz.trace_plot(snapshot), viz.trace_plot(snapshot, plot_segments=True)):
        assert "add_local_files" in page
    assert "Allocator State History" in viz.segment_plot(snapshot)
    listing = viz.trace(snapshot)
    asked = [entry for entry in snapshot["device_traces"][0] if entry["action"] == "segment_alloc"]
    assert len(re.findall(r"cudaMalloc\(", listing)) == len(asked)
    assert "cudaFree" in listing


def test_every_piece_says_who_made_it(run):
    snapshot, _, _ = run
    entries = [e for e in snapshot["device_traces"][0] if e["action"] == "alloc"]
    frames = [{frame["filename"]: frame["name"] for frame in e["frames"]} for e in entries]
    attention = [f for f in frames if f["module"].endswith("attention.self")]
    assert {"aten._softmax", "aten.bmm"} <= {frame["operation"] for frame in attention}
    assert any(frame["category"] == "workspaces" for frame in frames)
    assert all(
        entry["category"] == frame["category"] for entry, frame in zip(entries, frames, strict=True)
    )


def test_it_is_written_as_pytorch_writes_it(tmp_path):
    with SimulatedGPU("T4") as gpu:
        torch.cuda.memory._record_memory_history(max_entries=1000)
        kept = torch.zeros(MiB, device="cuda")
        torch.cuda.memory._dump_snapshot(tmp_path / "pytorch.pickle")
        gpu.dump_snapshot(tmp_path / "ours.pickle")
        torch.cuda.memory._record_memory_history(enabled=None)
        assert torch.cuda.memory_snapshot() == gpu.snapshot()["segments"]
        del kept
    ours, theirs = (
        pickle.loads((tmp_path / name).read_bytes()) for name in ("ours.pickle", "pytorch.pickle")
    )
    assert ours == theirs
    assert ours["segments"][0]["blocks"][0]["requested_size"] == 4 * MiB


def test_an_out_of_memory_is_an_event_of_its_own():
    with SimulatedGPU(64 * MiB) as gpu:
        kept = torch.zeros(8 * MiB, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(16 * MiB, device="cuda")
        last = gpu.snapshot()["device_traces"][0][-1]
        assert (last["action"], last["size"], last["device_free"]) == ("oom", 64 * MiB, 32 * MiB)
        assert "OutOfMemoryError # 64.0MiB requested, 32.0MiB free" in viz.trace(gpu.snapshot())
        del kept


def test_a_ledger_without_an_allocator_has_none():
    with pytest.raises(ValueError, match="needs a ledger with an allocator"):
        take_snapshot(Ledger())
