"""What chapter 4 runs and draws beside its text."""

import torch

from memlab import MiB, find_gpu
from memlab.book.chapters import accumulation

LOSSES = [[6.0, 5.0], [6.1, 5.2]]  # of two seeds


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


def test_passes_are_counted_by_the_steps_that_follow_them():
    def by_fours(model, optimizer, batches):
        for number, batch in enumerate(batches, 1):
            model(**batch)
            if number % 4 == 0:
                optimizer.step()

    assert accumulation.counted(by_fours, 10) == ([4, 4], 2)


def test_the_guides_runs_are_printed_above_what_todays_kernels_need():
    guide = accumulation.guide_runs()
    assert (guide["published"] / MiB).tolist() == [14949, 8681]
    share = guide["simulated"] / guide["published"]
    assert (share > 0.85).all() and (share < 1).all()


def test_checkpoints_hold_less_than_single_sequences_and_cost_more_time():
    frame = accumulation.beside_checkpointing()
    halves, ones, checkpointed, single, last = frame["peak"]
    assert checkpointed < ones < halves and last < find_gpu("T4").usable / MiB < single
    seconds = frame["s a step"].tolist()
    assert seconds[0] < seconds[1] < seconds[2] and seconds[3] < seconds[4]


def test_the_twin_is_predicted_to_the_byte():
    ((label, (predicted, measured)),) = accumulation.predicted_and_measured([(1, 2)]).items()
    assert label == "1 x 2"
    assert abs(predicted.peak_tensors - measured.footprint.peak_tensors) < 1000  # step counters


def test_figures_name_each_way_once_and_draw_every_micro_batch():
    fig = accumulation.learning_figure({way: LOSSES for way in ("16 x 1", "4 x 4", "1 x 1")})
    assert fig.axes[0].get_legend_handles_labels()[1] == ["16 x 1", "4 x 4", "1 x 1"]
    lane, below = accumulation.idea_figure([0.0, 0.1, 0.3], whole=0.3).axes
    said = [text.get_text() for text in lane.texts]
    assert said == ["F", "B", "F", "B", "step", "batch 1", "batch 2"]
    assert below.lines[0].get_ydata().tolist() == [0, 0.1, 0.3, 0.3]
