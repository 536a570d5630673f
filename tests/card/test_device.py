"""A loop of one's own on the simulated card: where tensors lie, out of memory, what is put back."""

import contextlib
import re

import pytest
import torch
from helpers import refused
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import BertForSequenceClassification

from memlab import MiB, Recipe, SimulatedGPU, simulate
from memlab.models import config


def reader_loop(batch_size, steps, halve=False):
    """A loop as a reader writes it for CUDA."""
    model = BertForSequenceClassification._from_config(
        config("bert-large"), attn_implementation="eager"
    )
    model.to("cuda").train()
    optimizer = torch.optim.AdamW(model.parameters())
    done, messages = 0, []
    while done < steps:
        try:
            tokens = torch.randint(0, 30000, (batch_size, 512), device="cuda")
            labels = torch.zeros(batch_size, dtype=torch.long).cuda()
            loss = model(input_ids=tokens, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
        except torch.OutOfMemoryError as error:
            messages.append(str(error))
            if not halve:
                raise
            batch_size //= 2
            optimizer.zero_grad()
    return batch_size, messages


def test_out_of_memory_in_pytorchs_words_and_on_with_half_the_batch():
    with SimulatedGPU("T4") as gpu:
        batch_size, messages = reader_loop(8, steps=2, halve=True)
        capacity = torch.cuda.mem_get_info()[1]
    assert batch_size == 4
    assert len(messages) == 1
    size = r"([\d.]+) ([MG]iB)"
    found = re.fullmatch(
        rf"CUDA out of memory\. Tried to allocate {size}\. GPU 0 has a total capacity of {size} "
        rf"of which {size} is free\. Including non-PyTorch memory, this process has {size} memory "
        rf"in use\. Of the allocated memory {size} is allocated by PyTorch, and {size} is "
        r"reserved by PyTorch but unallocated\. If reserved but unallocated memory is large try "
        r"setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation\.  See "
        r"documentation for Memory Management  \(https://.*#environment-variables\)",
        messages[0],
    )
    values = [
        float(number) * {"MiB": 1, "GiB": 1024}[unit]
        for number, unit in zip(found.groups()[::2], found.groups()[1::2], strict=True)
    ]
    wanted, total, free, used, allocated, cached = values
    assert total == pytest.approx(capacity / MiB, rel=0.001)
    assert free < wanted
    assert free + used == pytest.approx(total, rel=0.001)
    context = gpu.gpu.context / MiB
    assert allocated + cached + context == pytest.approx(used, rel=0.002)


def test_a_pinned_copy_of_a_view_in_another_order_needs_memory_on_the_card_for_a_moment():
    for pin_memory, more in ((False, 0), (True, 1)):
        with SimulatedGPU() as gpu:
            x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
            turned = x.t()
            gpu.reset_peak()
            with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
                y = turned.tanh()
            peak = gpu.footprint.peak_allocated
            del y
        assert peak == (2 + more) * 4 * 2**20


def test_the_footprint_stays_as_it_was_at_the_end():
    with SimulatedGPU() as gpu:
        x = torch.zeros(MiB, device="cuda")
    before = gpu.footprint
    del x
    assert gpu.footprint == before and before.breakdown["temporary"] == 4 * MiB


def test_a_card_is_entered_once():
    with SimulatedGPU("T4") as card:
        pass
    with refused("make a new one"):
        card.__enter__()
    with SimulatedGPU("T4"):
        pass


def test_rules_are_known_by_name_and_a_script_by_its_path():
    with refused("rules has 'nope'", "allowed are dropout,"):
        SimulatedGPU("T4", rules=["nope"])
    with SimulatedGPU("T4", script=__file__) as gpu:
        held = torch.ones(4, device="cuda")
        assert any("test_device.py" in line for line in gpu.footprint.by_line()), held


def test_one_card_at_a_time():
    with SimulatedGPU("T4"):
        with refused("active already"):
            simulate(Recipe(model="bert-base-tiny", seq_len=16))
    assert simulate(Recipe(model="bert-base-tiny", seq_len=16)).peak_allocated > 0


def test_a_release_without_a_name_that_is_replaced_is_said_in_a_line(monkeypatch):
    monkeypatch.delattr(FSDPParamGroup, "post_backward")
    with refused(r"post_backward.*: this memlab is older than the installed libraries \(torch 2"):
        SimulatedGPU().__enter__()
    monkeypatch.undo()
    with SimulatedGPU() as gpu:  # nothing is left behind
        torch.ones(3, device="cuda")
    assert gpu.footprint.peak_allocated


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return {"input_ids": torch.full((512,), i)}


@pytest.mark.parametrize(("pinned", "how"), [(False, None), (True, None), (False, "spawn")])
def test_workers_of_a_data_loader_make_tensors_on_the_host(gpu, pinned, how):
    loader = torch.utils.data.DataLoader(
        Rows(), 2, num_workers=1, pin_memory=pinned, multiprocessing_context=how
    )
    for batch in loader:
        tokens = batch["input_ids"]
        assert torch.cuda.memory_allocated() == 0
        tokens = tokens.to("cuda", non_blocking=True)
        assert tokens.shape == (2, 512)
        assert torch.cuda.memory_allocated() == 2 * 512 * 8
        del tokens


def train_two_steps(model, device):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(4, 8, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("end", [None, ZeroDivisionError, KeyboardInterrupt, "out of memory"])
def test_a_model_that_moved_in_has_its_data_again_outside_whatever_ended_it(end):
    """Trained outside afterwards, it comes to the bytes of one that never was inside."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        layers = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
        models.append(torch.nn.Sequential(*layers))
    inside, never = models
    with contextlib.suppress(ZeroDivisionError, KeyboardInterrupt, torch.OutOfMemoryError):
        with SimulatedGPU(1024 * MiB):
            inside.cuda()
            train_two_steps(inside, "cuda")
            assert inside[0].weight.is_cuda
            if end == "out of memory":
                torch.zeros(2048 * MiB, device="cuda")
            elif end:
                raise end
    for model in models:
        train_two_steps(model, "cpu")
    for name, value in never.state_dict().items():
        assert torch.equal(inside.state_dict()[name], value), name
    assert torch.tensor(2.0).device.type == "cpu" and f"{torch.tensor(2.0):.1f}" == "2.0"
