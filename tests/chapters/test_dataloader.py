"""Chapter 11: its loaders do what it says they do, and its schedule keeps PyTorch's rules."""

import itertools
import os
import random

import pandas as pd
import pytest
import torch
from notebook import Notebook

from memlab import find_records, simulate

CHAPTER = Notebook("11-dataloader")
DEEPER = Notebook("11-dataloader-deeper")


@pytest.fixture(scope="module")
def loading():
    """Data set, model, loop and loader, with texts that cost nothing to load."""
    namespace = CHAPTER.run("imports dataset corpus loop changed")
    namespace["ids"] = namespace["ids"][:64]
    return namespace


@pytest.fixture(scope="module")
def schedule():
    return CHAPTER.run("schedule")["schedule"]


@pytest.mark.parametrize("workers, prefetch", itertools.product((1, 2, 3, 4, 8), (1, 2, 4)))
@pytest.mark.parametrize("load", [0.3, 1, 3, 8])
def test_in_the_long_run_a_step_takes_what_the_slower_side_takes(schedule, load, workers, prefetch):
    plan = schedule([load] * 400, 1, workers, prefetch)
    step = (plan[-1][3] - plan[200][3]) / 199
    if prefetch > 1:  # else a worker idles until its only batch is taken
        assert step == pytest.approx(max(1, load / workers), rel=0.03)
    assert step >= max(1, load / workers) * 0.97


def test_a_schedule_keeps_the_rules_of_the_loader(schedule):
    loads = [1 + (7 * n) % 5 for n in range(60)]
    for workers, prefetch in itertools.product((1, 2, 4), (1, 2, 3)):
        plan = schedule(loads, 1.5, workers, prefetch)
        for n, (begin, end, delivered, done) in enumerate(plan):
            assert end == begin + loads[n] and delivered >= end and done == delivered + 1.5
            if n:
                assert delivered >= plan[n - 1][3]
            if n >= workers:
                assert begin >= plan[n - workers][1]
            if n >= workers * prefetch:
                assert begin >= plan[n - workers * prefetch][2]


def test_without_workers_loading_and_computing_take_turns(schedule):
    plan = schedule([2, 3, 4], 1, 0)
    assert plan == [(0, 2, 2, 3), (3, 6, 6, 7), (7, 11, 11, 12)]


@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_is_loaded_once_and_by_whom_it_says(loading, workers):
    loader = loading["load"](loading["Texts"](loading["ids"][:24]), workers)
    losses, seen, events = loading["train"](loader, *loading["start"]())
    assert len(losses) == 3 and sorted(seen) == list(range(24))
    loads = [event for event in events if event[0] == "load"]
    who = {event[1] for event in loads}
    assert len(loads) == 24 and len(who) == max(1, workers)
    assert (os.getpid() in who) == (workers == 0)
    assert all(begin <= end for _, _, begin, end in events)


def test_workers_change_neither_order_nor_losses(loading):
    data = loading["Texts"](loading["ids"][:16])
    orders = []
    for seed in (0, 1, 2):
        results = [
            loading["train"](loading["load"](data, workers, seed), *loading["start"](seed))[:2]
            for workers in (0, 3)
        ]
        assert results[0] == results[1]  # to the last bit
        orders.append(results[0][1])
    assert orders[0] != orders[1] != orders[2]


def test_random_numbers_by_index_do_not_depend_on_the_workers(loading):
    CHAPTER.run("chance-wrong chance-fixed chance-compared", loading)  # asserts both
    data = loading["MaskedByIndex"](loading["ids"])
    first = data[3]["input_ids"]
    data.epoch = 1
    assert not torch.equal(data[3]["input_ids"], first)


def test_so_many_batches_are_under_way_as_counted(loading):
    loading = loading | {"ids": torch.arange(128)[:, None]}
    CHAPTER.run("ahead", loading)  # asserts
    for workers, prefetch in [(1, 1), (2, 3)]:
        assert loading["asked_for"](workers, prefetch) == 1 + workers * prefetch
    assert loading["asked_for"](0) == 1


def test_deeper_prefetching_hides_uneven_samples(loading):
    CHAPTER.run("schedule uneven uneven-said", loading)  # asserts what workers do
    shares = [loading["waits"](loading["uneven"], 4, p) for p in (1, 2, 4, 8)]
    assert shares[0] > shares[1] > shares[2] >= shares[3]


def test_out_of_order_the_device_waits_less_and_sees_everything(loading):
    CHAPTER.run("in-order", loading)  # asserts that every sample comes
    (in_turn, first), (ready, second) = (loading["found"][order] for order in (True, False))
    assert ready < in_turn and first == sorted(first) != second


def test_a_rank_gets_its_share_and_two_samples_come_twice(loading):
    CHAPTER.run("ranks", loading)  # asserts


def test_an_epoch_is_taken_up_where_it_was_left(loading):
    CHAPTER.run("resume resume-check", loading | {"ids": torch.arange(128)[:, None]})  # asserts


def test_persistent_workers_stay(loading):
    CHAPTER.run("persist", loading)  # asserts


@pytest.fixture(scope="module")
def memory():
    namespace = CHAPTER.run("imports store reader")
    count = 20_000
    namespace |= {"count": count, "strings": [f"{i} {'x' * 200}" for i in range(count)]}
    return namespace


def test_a_worker_copies_a_list_that_it_reads_and_no_array(memory):
    strings = memory["strings"]
    size = sum(map(len, strings))
    memory["private"](None)  # a process's first worker writes more pages than those after it
    own = {}
    for name, store in {
        "nothing": None,
        "list": strings,
        "array": memory["Packed"](strings),
    }.items():
        held, characters = memory["private"](store)
        own[name] = held[-1]
        assert characters == (0 if store is None else size)
    assert own["list"] - own["nothing"] > size
    assert own["array"] - own["nothing"] < 0.3 * size


def test_the_packed_store_gives_the_strings(memory):
    strings = ["", "one", "zwölf \N{SNOWMAN}", "x" * 5000]
    store = memory["Packed"](strings)
    assert [store[i] for i in range(4)] == strings


@pytest.fixture(scope="module")
def deeper():
    return DEEPER.run("imports")


def test_a_collection_in_a_worker_copies_unless_frozen(deeper):
    how = dict(num_workers=1, multiprocessing_context="fork")
    DEEPER.run("freeze-data freeze-run", deeper | {"how": how})
    collected = DEEPER.run("freeze-data freeze-run", deeper | {"how": how})["collected"]
    assert collected["collect"] > collected["freeze_and_collect"] + 10 * 2**20


def test_own_generators_are_copied_and_numpys_is_seeded(loading):
    CHAPTER.run("copied", loading)
    wrong, *_ = loading["draws"]["own generator, copied"]
    assert loading["different"]["own generator, copied"] == 1
    assert loading["different"]["own generator by index"] == 4
    assert loading["different"]["NumPy's global generator"] > 1
    assert 0 <= wrong < 1000


def test_a_stream_arrives_once_for_each_worker_unless_shared_out(loading):
    CHAPTER.run("iterable-run iterable-read", loading)
    assert sorted(loading["streams"][False]) == sorted([*range(6)] * 2)
    assert sorted(loading["streams"][True]) == list(range(6))


def test_a_function_without_a_name_cannot_be_spawned(deeper):
    with pytest.warns(UserWarning, match="pickle error"):
        DEEPER.run("spawn-refused", deeper)
    DEEPER.run("spawn-fixed", deeper)  # asserts
    assert "pickle" in deeper["refused"] and "lambda" in deeper["refused"]


def test_a_killed_worker_is_named(deeper):
    DEEPER.run("dies-run dies-read", deeper)
    assert "worker (pid" in deeper["killed"]


def test_arguments_that_contradict_each_other(loading, deeper, capsys):
    DEEPER.run("arguments", deeper)
    CHAPTER.run("arguments-empty", loading)
    printed = capsys.readouterr().out
    assert "prefetch_factor option could only be specified in multiprocessing" in printed
    assert "persistent_workers option needs num_workers > 0" in printed
    assert "batches in an epoch: 0" in printed


def test_what_only_a_gpu_measures_makes_its_table(loading):
    """The tables from clocks that stand in for a card's."""
    names = loading | {"batches": {"text": 2**10, "images": 2**20}}
    CHAPTER.run("pinned", names)
    if not torch.cuda.is_available():
        assert names["bandwidth"](2**10, pin=False, times=1) > 0
        names["bandwidth"] = lambda nbytes, pin: 24.0 if pin else 8.0
    pins = []
    clock = names["bandwidth"]
    names["bandwidth"] = lambda nbytes, pin: pins.append(pin) or clock(nbytes, pin)
    table = names["copies"]()
    assert {type(pin) for pin in pins} == {bool}  # torch.empty takes no 0 or 1 for pin_memory
    assert list(table.columns) == ["pageable", "pinned", "pageable again"]
    assert (table["pageable"] > 0).all() and list(table.index) == ["text", "images"]
    products = DEEPER.run("imports tiles rows-shown vocabulary-run gemm")
    assert products["gemm_seconds"](8, times=1) > 0
    products["gemm_seconds"] = lambda columns: 2.0 if columns % 64 else 1.0
    assert products["gemm_ratios"]() == {"as it is": 1, "padded": 0.5, "as it is, again": 1}


def test_tiles_and_waves_are_counted():
    used = DEEPER.run("imports tiles")["used"]
    assert used(128 * 40, 128, "T4") == 1  # one whole wave of 40 multiprocessors
    assert used(128 * 41, 128, "T4") == pytest.approx(41 / 80)
    assert used(128 * 40, 129, "T4") == pytest.approx(129 / 256)
    assert all(0 < used(8 * n, 100, "A100-80GB") <= 1 for n in range(1, 99))


def test_padding_a_vocabulary_takes_the_bytes_of_its_rows():
    names = DEEPER.run("imports")
    runs = []
    for vocabulary in (1025, 1088):
        config = names["models"].config("gpt2-tiny")
        config.vocab_size = vocabulary
        runs.append(simulate(names["Recipe"](config, seq_len=64)).breakdown)
    wide = names["models"].config("gpt2-tiny").hidden_size
    few, many = runs
    assert many["parameters"] - few["parameters"] == 63 * wide * 4
    assert many["optimizer_states"] - few["optimizer_states"] == 63 * wide * 8


def test_padded_logits_enter_the_loss_unless_masked(deeper):
    DEEPER.run("padded-run", deeper)
    assert deeper["logits"].shape[-1] == 64 * -(-(deeper["rows"] + 1) // 64) > deeper["rows"]
    assert deeper["after"] > deeper["before"] + 1e-3
    assert deeper["masked_loss"] == pytest.approx(deeper["before"], abs=1e-5)


def test_trainer_and_accelerate_train_the_same(loading):
    CHAPTER.run("trainer trainer-run trainer-same", loading)  # asserts
    data = loading["Texts"](loading["ids"][:24])
    order = [i for batch in loading["load"](data, 0) for i in batch["index"].tolist()]
    CHAPTER.run("accelerate", loading | {"same": {(0, 0): (None, order)}})  # asserts


def test_verdicts():
    names = CHAPTER.run("imports schedule uneven uneven-said")
    runs = find_records("published", device="V100")
    v100 = {run.name: run.figures["samples_per_second"] for run in runs}
    busy = {("waiting", n, 4): 0.9 for n in (0.5, 3, 8)}
    busy |= {("work, 1 core", 2, n): 0.4 for n in (1, 4)}
    names |= {"fast": None, "share": 3e-5, "v100": v100, "busy": busy, "control": 3.0}
    words = {id: CHAPTER.verdict(id, names) for id in ("D2", "D3", "D1")}
    names = DEEPER.run("imports tiles rows-shown")
    names |= {"even": names["models"].config("gpt2"), "products": None}
    names["even"].vocab_size = 50304
    assert words.pop("D3") == DEEPER.verdict("B10", names) == "open"  # without a GPU
    DEEPER.run("overview", names)
    names |= {"saving": {1: 0.0, 16: 0.24}, "faster": {1: 2.0, 16: 3.4}}
    words["B1"] = DEEPER.verdict("B1", names)
    assert set(words.values()) == {"holds with a condition"}
    names |= {"faster": {1: 0.5, 16: 0.5}}  # an estimate decides nothing
    assert DEEPER.verdict("B1", names) == "holds with a condition"
    for padded, word in ((0.5, "holds with a condition"), (1.1, "does not hold")):
        names["products"] = {"padded": padded, "as it is, again": 1.0}
        assert DEEPER.verdict("B10", names) == word
    names = {"share": 3e-5}
    for pinned, word in (([12.0, 6.0], "does not hold"), ([6.0, 12.0], "holds with a condition")):
        names["fast"] = pd.DataFrame({"pageable": [9.0, 9.0], "pinned": pinned})
        assert CHAPTER.verdict("D3", names) == word


@pytest.mark.parametrize("number, wrong", [(1, 3), (2, 100), (3, 12345)])
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(loading, capsys, number, wrong):
    if number == 3:
        CHAPTER.run("chance-wrong chance-fixed chance-compared", loading)
    CHAPTER.run("schedule uneven", loading)
    loading["batches"] = {"images, 64 x 3 x 224 x 224, fp32": 64 * 3 * 224 * 224 * 4}
    CHAPTER.check_exercise(number, wrong, loading, capsys)


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("prefetch", [1, 2, 4])
def test_no_schedule_beats_the_formula(schedule, workers, prefetch):
    """Loading and computing take at least max(C, L/w) a step; without workers exactly L + C."""
    draw = random.Random(0)
    for compute in (0.5, 1.0, 3.0):
        loads = [draw.choice([0.2, 1.0, 10.0]) for _ in range(60)]
        took = schedule(loads, compute, workers, prefetch)[-1][3]
        work, bound = sum(loads), 60 * compute
        if workers:
            assert took >= max(bound, work / workers) - 1e-9
        else:
            assert took == pytest.approx(work + bound)
