"""Checkpoints inside a simulated card: written with zeros, read back to where they belong."""

import json
import os
import struct

import pytest
import safetensors
import torch
from helpers import allocated
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from memlab import MiB, SimulatedGPU


def sparse_file(path, rows):
    """One weight of so many rows of 8 KiB, whose zeros take no room on the disk."""
    end = 8192 * rows
    small = {"dtype": "F32", "shape": [2], "data_offsets": [end, end + 8]}
    large = {"dtype": "BF16", "shape": [rows, 4096], "data_offsets": [0, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, "large": large, "small": small}).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.seek(end, 1)
        file.write(struct.pack("<2f", 1.5, -2.0))
    return end + 8


def test_a_checkpoint_may_be_larger_than_the_hosts_memory(tmp_path):
    """A file of four times of what the host has; a host that takes it all the same is as good."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    file = tmp_path / "model.safetensors"
    size = sparse_file(file, 4 * memory // 8192)
    with SimulatedGPU():
        with safetensors.safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"} and opened.keys() == ["large", "small"]
            assert opened.get_tensor("small").tolist() == [1.5, -2.0]
            part = opened.get_slice("large")
            assert part.get_shape() == [4 * memory // 8192, 4096] and part.get_dtype() == "BF16"
            assert part[3:5].shape == (2, 4096) and part[...].nbytes == size - 8
        weights = safetensors.torch.load_file(file, device="cuda")
        assert weights["large"].is_cuda and weights["large"].nbytes == size - 8
        assert allocated() >= size


def trained():
    model = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 1024, device="cuda")).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    "map_location, place, counters",  # of AdamW, which were on the host
    [
        ("cpu", "cpu", 0),
        (None, "cuda", 0),
        ("cuda", "cuda", 2),
        ({"cuda:0": "cpu"}, "cpu", 0),
        (lambda storage, location: storage, "cpu", 0),
        (lambda storage, location: storage.cuda(0), "cuda", 2),
        (lambda storage, location: None, "cuda", 0),
    ],
)
def test_a_checkpoint_comes_back_to_where_it_is_sent(gpu, map_location, place, counters, tmp_path):
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(state, tmp_path / "last.pt")
    held = allocated()
    loaded = torch.load(tmp_path / "last.pt", map_location=map_location)
    here = 3 * (1024 * 1024 + 1024) * 4 if place == "cuda" else 0  # with AdamW's two states
    assert allocated() - held == here + 512 * counters
    assert loaded["model"]["weight"].device.type == place
    assert loaded["epoch"] == 3 and loaded["optimizer"]["state"][0]["step"] == 1
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    assert optimizer.state[model.weight]["exp_avg"].is_cuda
    assert (tmp_path / "last.pt").stat().st_size < MiB


@pytest.mark.parametrize("saved_on", ["the host", "the card"])
def test_tied_weights_come_back_as_one(saved_on, tmp_path):
    def tied():
        embedding, head = torch.nn.Embedding(512, 1024), torch.nn.Linear(1024, 512, bias=False)
        head.weight = embedding.weight
        return torch.nn.Sequential(embedding, head)

    if saved_on == "the host":
        torch.save(tied().state_dict(), tmp_path / "last.pt")
    with SimulatedGPU():
        if saved_on == "the card":
            torch.save(tied().cuda().state_dict(), tmp_path / "last.pt")
        held = allocated()
        state = torch.load(tmp_path / "last.pt", map_location="cuda")
        assert len(state) == 2 and allocated() - held == 2 * MiB


def test_a_whole_module_comes_back_to_the_card(gpu, tmp_path):
    model, _ = trained()
    torch.save(model, tmp_path / "model.pt")
    held = allocated()
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert again.weight.is_cuda and again.bias.is_cuda
    assert allocated() - held == (1024 * 1024 + 1024) * 4


def test_what_is_saved_inside_is_read_outside_as_zeros(tmp_path):
    with SimulatedGPU():
        model, _ = trained()
        save_file(model.state_dict() | {"ids": torch.arange(5).cuda()}, tmp_path / "a.safetensors")
        torch.save(model.cpu().state_dict(), tmp_path / "a.pt")
        on_card = load_file(tmp_path / "a.safetensors", device="cuda")
        assert on_card["weight"].is_cuda
    for loaded in (load_file(tmp_path / "a.safetensors"), torch.load(tmp_path / "a.pt")):
        assert loaded["weight"].shape == (1024, 1024) and loaded["weight"].count_nonzero() == 0
    assert load_file(tmp_path / "a.safetensors")["ids"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("device", ["cuda", 0, "cpu"])
def test_a_file_of_weights_is_opened_for_the_card(device, tmp_path):
    import safetensors

    path = tmp_path / "a.safetensors"
    save_file({"weight": torch.ones(1024, 1024), "ids": torch.arange(5)}, path)
    with SimulatedGPU():
        with safetensors.safe_open(path, framework="pt", device=device) as file:
            assert sorted(file.keys()) == ["ids", "weight"]
            part = file.get_slice("weight")
            assert part.get_shape() == [1024, 1024]
            held = [part[:512], file.get_tensor("weight")]
            ids = file.get_tensor("ids")
        there = device != "cpu"
        assert all(one.is_cuda == there for one in (*held, ids))
        assert allocated() == there * (6 * MiB + 512)
        assert ids.tolist() == [0, 1, 2, 3, 4]
    assert safetensors.safe_open is safe_open
