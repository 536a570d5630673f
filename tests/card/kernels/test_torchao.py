"""A script's torchao optimizer on the simulated card: states in 8 and 4 bits, its compiled step."""

import pytest
import torch

from memlab import SimulatedGPU

pytest.importorskip("torchao")


@pytest.mark.parametrize(("name", "bits"), [("AdamW8bit", 8), ("AdamW4bit", 4)])
def test_its_states_are_as_wide_as_its_name_says(name, bits):
    import torchao.optim

    with SimulatedGPU("L4") as gpu:
        model = torch.nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16, device="cuda")
        gpu.watch(model)
        optimizer = getattr(torchao.optim, name)(model.parameters())
        for _ in range(2):
            model(torch.ones(8, 1024, dtype=torch.bfloat16, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    states = gpu.footprint.breakdown["optimizer_states"]
    assert states == pytest.approx(2 * 1024 * 1024 * bits / 8, rel=0.1)
    assert any("torchao's compiled step" in said for said in gpu.footprint.assumptions)
