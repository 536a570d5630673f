"""Tables of chapter 17: ranges of what links give, bytes that tensor parallelism sends."""

import pytest

from memlab import models
from memlab.book.chapters import parallel, parallel_deeper
from memlab.footprint import StepTime


def a_step(low, high):
    return StepTime(low, (low + high) / 2, high, {}, 0, 0.0)


def test_gains_are_ranges_of_eight_cards_beside_one():
    times = {"1B on 8 cards, ddp": a_step(2.0, 4.0), "70B on 64 cards": a_step(10.0, 20.0)}
    table = parallel.links_table(times, single=a_step(1.0, 1.5))
    assert list(table["s a step"]) == ["2.0–4.0", "10–20"]
    assert list(table["gain"]) == ["3.0–4.0", "—"]  # 8 x 1.5 / 4 and 8 x 1 / 2


def test_two_all_reduces_a_layer_each_way():
    once, sent = parallel.all_reduces("llama-2-70b", 4096, ranks=8)
    config = models.config("llama-2-70b")
    assert once == 4096 * config.hidden_size * 2 == 64 * 2**20
    assert sent == pytest.approx(4 * config.num_hidden_layers * once * 2 * 7 / 8)


def test_the_mean_of_the_ranks_is_taken_step_by_step():
    reports = [{"DDP": ([1.0, 3.0], {})}, {"DDP": ([2.0, 5.0], {})}]
    assert parallel.means(reports, "DDP") == [1.5, 4.0]


def test_shares_of_an_nf4_base_are_counted_by_rank():
    two, four = (parallel_deeper.rest_of_nf4("llama-3-8b-tiny", n) for n in (2, 4))
    assert two[0] == 2 * four[0] and two[1] == four[1] and two[2] == 2 * four[2]
