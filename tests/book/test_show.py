"""Tables and figures."""

import io

import pytest
from IPython.core.pylabtools import print_figure
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgba

from memlab import MiB, Recipe, compare, measure, simulate
from memlab.book import show
from memlab.gpus import GPUS

TINY = Recipe(model="bert-large-tiny", batch_size=2, seq_len=32)


@pytest.fixture(scope="module")
def runs():
    return {"simulated": simulate(TINY, "T4"), "measured": measure(TINY, "cpu", steps=1)}


def test_compare_is_in_mib(runs):
    frame, predicted = compare(runs), runs["simulated"]
    assert frame.loc["simulated", "peak"] == predicted.peak_allocated / MiB
    assert frame.loc["measured", "samples/s"] == runs["measured"].samples_per_second
    assert frame.loc["simulated", "ms a step, estimated"] == predicted.step_time.expected * 1e3


def test_table_formats_mib_and_per_cent(runs):
    frame = compare(runs)
    frame["error"] = show.error(frame["peak"], frame["peak"]["measured"])
    html = show.table(frame, "Twin").to_html()
    assert "Twin" in html and ">0.00%" in html
    assert "nan" not in html
    seconds = show.table(frame[["peak"]].assign(**{"s a step, estimated": 1.25})).to_html()
    assert ">1.25<" in seconds


def test_a_figure_is_transparent_and_does_not_ask_for_a_ground(runs):
    """IPython reads a colour without alpha as such a wish, and JupyterLab grants it."""
    fig = show.bars(runs)
    picture = print_figure(fig)
    assert plt.imread(io.BytesIO(picture))[0, 0, 3] == 0
    assert to_rgba(fig.get_facecolor())[3] == 1


def test_bars_have_every_category_of_weight_the_cards_line_and_the_estimated_seconds(runs):
    (ax,) = show.bars(runs, limit="T4").axes
    drawn = sum(bar.get_width() for bar in ax.patches) * 2**30
    wanted = sum(getattr(run, "footprint", run).peak_allocated for run in runs.values())
    assert drawn == pytest.approx(wanted, rel=0.02)
    (line,) = ax.lines
    assert line.get_xdata() == pytest.approx([GPUS["T4"].usable / 2**30] * 2)
    assert ax.get_xlim()[1] >= GPUS["T4"].usable / 2**30
    time, texts = runs["simulated"].step_time, [text.get_text() for text in ax.texts]
    assert f"{show.between(time.low, time.high)} s" in texts and "a step,\nestimated" in texts
    plt.close("all")


def test_a_range_has_two_figures_and_stands_once_where_its_ends_agree():
    assert show.between(0.3929, 0.5718) == "0.39–0.57"
    assert show.between(0.0102, 0.0278) == "0.010–0.028"
    assert show.between(20.6, 41.4) == "21–41" and show.between(1234, 2345) == "1,234–2,345"
    assert show.between(1.21, 1.23) == "1.2" and show.ratio_between(1.0) == "0.8–1.3"
