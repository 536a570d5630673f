"""How often published runs take more than is predicted of them."""

from memlab.evidence.shortfall import shortfall


def test_the_more_room_the_less_often():
    needed = 10**10
    chances = [shortfall(needed, int(needed * share)).chance for share in (1, 1.05, 1.1, 2)]
    assert chances == sorted(chances, reverse=True)
    assert 0 < chances[1] < 0.2 and chances[-1] == 0
    assert str(shortfall(needed, 2 * needed)).startswith("below 1% (0 of ")
    some = shortfall(needed, needed)
    assert str(some) == f"{some.short / some.runs:.0%} ({some.short} of {some.runs} published runs)"
