"""Drawings of one idea: their labels carry the figures of the book, and each label is readable."""

import itertools
from functools import cache

import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

from memlab import Recipe, models, simulate
from memlab.book import drawing, show
from memlab.book.chapters import anatomy, attention, deploying, padding, parallel
from memlab.book.chapters import quantization_figures as quantization
from memlab.predict.formula_serving import kv_cache_bytes

LENGTHS, PACKED = [300, 512, 80, 30], [[1], [0, 2, 3]]
WEIGHTS = torch.tensor([-0.6, 0.1, 0.4, 1.3, 2.0])


def one_of(way, ranks, parts):
    """Bytes that a rank keeps, split as the book's function does it."""
    copied = {"ddp": 3, "zero1": 2, "zero2": 1, "zero3": 0}[way]
    return sum(parts[:copied]) + sum(parts[copied:]) / ranks


def two_and_two(lengths, size):
    return [[0, 1], [2, 3]]


@cache
def one_step():
    return simulate(Recipe("bert-large", batch_size=8, seq_len=512, attention="sdpa"))


def in_four_bits():
    scale = torch.tensor(2.6 / 15)
    return WEIGHTS, torch.round(WEIGHTS / scale) - 5, scale, torch.tensor(-5.0)


DRAWN = {
    "step": lambda: anatomy.draw_step(one_step()),
    "shares": lambda: parallel.draw_shares(one_of),
    "scores": lambda: attention.draw_scores(3072, models.config("llama-3.2-1b")),
    "cache": deploying.draw_cache,
    "block": lambda: quantization.draw_block(*in_four_bits()),
    "rows": lambda: padding.draw_rows(LENGTHS, {"dynamic": two_and_two}, PACKED, 512),
}


@pytest.fixture(scope="module")
def drawn():
    figures = {name: make() for name, make in DRAWN.items()}
    yield figures
    plt.close("all")


def words(figure):
    return [text.get_text() for text in figure.axes[0].texts if text.get_text()]


def assert_readable(figure):
    """Every label is on the sheet, and no other label, edge, line or arrow touches it."""
    figure.canvas.draw()
    (ax,) = figure.axes
    texts = [text for text in ax.texts if text.get_text()]
    assert min(text.get_fontsize() for text in texts) >= 10
    boxes = {text: text.get_window_extent() for text in texts}
    for a, b in itertools.combinations(texts, 2):
        assert not boxes[a].overlaps(boxes[b]), (a.get_text(), b.get_text())
    lines = [line.get_path().transformed(line.get_transform()) for line in ax.lines if line.zorder]
    arrows = [text.arrow_patch for text in ax.texts if getattr(text, "arrow_patch", None)]
    lines += [arrow.get_path().transformed(arrow.get_transform()) for arrow in arrows]
    blocks = [block.get_window_extent() for block in ax.patches if isinstance(block, Rectangle)]
    fills = [(c.get_paths()[0], c.get_transform()) for c in ax.collections]
    fills = [path.transformed(move) for path, move in fills]
    for text, box in boxes.items():
        corners = box.corners()
        assert all(figure.bbox.padded(1).contains(*corner) for corner in corners), text.get_text()
        assert not any(line.intersects_bbox(box, filled=False) for line in lines), text.get_text()
        for block in blocks:
            inside = [block.padded(1).contains(*corner) for corner in corners]
            assert all(inside) or not box.overlaps(block), text.get_text()
        for fill in fills:
            inside = fill.contains_points(corners)
            assert all(inside) or not fill.intersects_bbox(box), text.get_text()


@pytest.mark.parametrize("name", DRAWN)
def test_every_label_is_readable(drawn, name):
    assert_readable(drawn[name])


@pytest.mark.parametrize("fault", ["label", "edge", "line", "sheet", "small"])
def test_an_unreadable_label_is_found(fault):
    figure, ax = drawing.sheet(1)
    drawing.say(ax, 2, 0.5, "words")
    assert_readable(figure)
    if fault == "label":
        drawing.say(ax, 2.2, 0.6, "others")
    elif fault == "edge":
        drawing.block(ax, (2.2, 0.4), (1, 0.5))
    elif fault == "line":
        ax.plot([1, 4], [0.2, 0.8])
    elif fault == "sheet":
        drawing.say(ax, 4.9, 0.1, "beyond")
    else:
        drawing.say(ax, 0.1, 0.1, "tiny", fontsize=7)
    with pytest.raises(AssertionError):
        assert_readable(figure)
    plt.close(figure)


def test_letters_on_a_block_are_black_or_white_by_its_colour():
    dark, light = (show.COLOURS[name] for name in ("parameters", "gradients"))
    assert (drawing.ink(dark), drawing.ink(light)) == ("white", "black")


def test_a_drawing_is_a_vector_picture_and_always_the_same():
    pictures = [show.vector(parallel.draw_shares(one_of)).data for _ in range(2)]
    assert pictures[0] == pictures[1] and "<svg" in pictures[0] and "<image" not in pictures[0]


def test_a_lane_says_its_most_and_a_phase_its_highest_sum(drawn):
    run, said = one_step(), words(drawn["step"])
    for kind in anatomy.KINDS:
        most = max(run.timeline.levels[kind]) / 2**30
        assert f"{kind.replace('_', ' ')} {most:.1f} GiB" in said
    worst = [n / 2**30 for n in list(run.worst_of_each_phase().values())[:3]]
    sums = [w for w in said if w.startswith(("all ", "peak "))]
    assert sums == [f"{'peak' if n == max(worst) else 'all'} {n:.1f} GiB" for n in worst]


def test_a_rank_keeps_what_the_bytes_beside_it_say(drawn):
    figure, ranks = drawn["shares"], 4
    said = [float(w.split()[0]) for w in words(figure) if w.endswith(" bytes")]
    assert said == [16, 10, 7, 4]
    filled = [b for b in figure.axes[0].patches if b.get_facecolor()[3]]
    lanes = [filled[i : i + 3 * ranks] for i in range(0, len(filled), 3 * ranks)]
    areas = [sum(b.get_width() * b.get_height() for b in row) for row in lanes]
    assert [16 * area / areas[0] for area in areas] == pytest.approx(said)


def test_scores_are_a_square_for_each_head_and_an_output_a_line(drawn):
    said = words(drawn["scores"])
    assert f"more than {32 * 3072**2 * 2 // 2**20} MiB" in said
    assert f"{32 * 3072 * (64 * 2 + 4) / 2**20:.0f} MiB" in said


def test_a_token_of_llama_3_takes_a_quarter_of_one_of_llama_2(drawn):
    two, three = (kv_cache_bytes(name, 1) for name in ("llama-2-7b", "llama-3-8b"))
    said = words(drawn["cache"])
    assert two == 4 * three and f"Llama 3 8B: {three / 1024:.0f} KiB a token" in said
    assert (said.count("K, V"), said.count("Q")) == (4 + 1, 8)
    assert "32 layers x 8 KV heads x 512 bytes" in said


def test_a_weight_points_at_the_mark_of_its_code(drawn):
    _, codes, scale, zero = in_four_bits()
    said = [w.replace("\N{MINUS SIGN}", "-") for w in words(drawn["block"])]
    for code in codes.tolist():
        assert f"{code:.0f}" in said
    assert {f"S {scale.item():.4f}", f"Z {zero.item():.0f}"} <= set(said)


def test_every_text_is_drawn_once_in_each_layout_with_its_padding(drawn):
    said = words(drawn["rows"])
    assert all(said.count(number) == 3 for number in "1234")
    tokens = {"fixed": 4 * 512, "dynamic": 2 * 512 + 2 * 80, "packed": 2 * 512}
    for name, computed in tokens.items():
        assert f"{name}: {1 - sum(LENGTHS) / computed:.0%} padding" in said
