"""Drawings of one idea: each label is readable."""

import itertools

import pytest
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

from memlab.book import drawing, show
from memlab.book.chapters import deploying

DRAWN = {
    "cache": deploying.draw_cache,
}


@pytest.fixture(scope="module")
def drawn():
    figures = {name: make() for name, make in DRAWN.items()}
    yield figures
    plt.close("all")


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


def test_a_drawing_is_a_vector_picture_and_always_the_same():
    pictures = [show.vector(deploying.draw_cache()).data for _ in range(2)]
    assert pictures[0] == pictures[1] and "<svg" in pictures[0] and "<image" not in pictures[0]
