"""How often published runs take more than is predicted of them."""

from memlab.evidence.records import load, published_files
from memlab.evidence.shortfall import excesses, shortfall


def test_every_published_run_with_bytes_and_a_prediction_counts():
    runs = [run for path in published_files().values() for run in load(path)]
    sized = [run for run in runs if any("peak_" in name for name in run.figures)]
    old = [run for run in runs if "device_used_bytes" in run.figures and run.date < "2023"]
    refused = 4
    assert len(excesses()) == len(sized) + len(old) - refused


def test_the_more_room_the_less_often():
    needed = 10**10
    chances = [shortfall(needed, int(needed * share)).chance for share in (1, 1.05, 1.1, 2)]
    assert chances == sorted(chances, reverse=True)
    assert 0 < chances[1] < 0.2 and chances[-1] == 0
    assert str(shortfall(needed, 2 * needed)).startswith("below 1% (0 of ")
    some = shortfall(needed, needed)
    assert str(some) == f"{some.short / some.runs:.0%} ({some.short} of {some.runs} published runs)"
