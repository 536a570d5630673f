"""What chapter 4 runs and draws beside its text."""

import torch

from memlab.book.chapters import accumulation


def test_a_padded_batch_is_split_without_loss_and_its_padding_has_no_label():
    batch = accumulation.paragraphs(8)
    parts = accumulation.split(batch, 4)
    for name, value in batch.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), value)
        assert {len(part[name]) for part in parts} == {2}
    hidden = batch["labels"] == -100
    assert 0 < hidden.sum() < hidden.numel()
    assert torch.equal(batch["labels"][~hidden], batch["input_ids"][~hidden])


def test_a_way_steps_on_its_windows_and_the_held_out_blocks_are_not_among_them():
    windows, seen = [], set()
    unseen = {tuple(row) for row in accumulation.blocks()[:64].tolist()}

    def step(model, optimizer, window):
        windows.append([len(part["input_ids"]) for part in window])
        seen.update(tuple(row) for part in window for row in part["input_ids"].tolist())

    losses = accumulation.learning(step, {"4 x 4": (4, 4, 1e-3, 0.9)}, seeds=1)["4 x 4"][0]
    assert windows == [[4] * 4] * 9 and not seen & unseen
    assert len(losses) == 4 and len(set(losses)) == 1  # this step trains nothing
