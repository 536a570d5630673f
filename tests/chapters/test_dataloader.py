"""Chapter 11: its loaders do what it says they do, and its schedule keeps PyTorch's rules."""

import itertools
import os

import pytest
import torch
from notebook import Notebook

from memlab import find_records, simulate
from memlab.book.claims import verdict

CHAPTER = Notebook("11-dataloader")


@pytest.fixture(scope="module")
def loading():
    """Data set, model, loop and loader, with texts that cost nothing to load."""
    namespace = CHAPTER.run("imports dataset corpus start loop changed")
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
    CHAPTER.run("chance-wrong chance-masked chance-mended chance-compared", loading)  # asserts both
    data = loading["MaskedByIndex"](loading["ids"])
    first = data[3]["input_ids"]
    data.epoch = 1
    assert not torch.equal(data[3]["input_ids"], first)


def test_so_many_batches_are_under_way_as_counted(loading):
    CHAPTER.run("ahead ahead-asked", loading)
    for workers, prefetch in [(1, 1), (2, 3)]:
        assert loading["asked_for"](workers, prefetch) == 1 + workers * prefetch
    assert loading["asked_for"](0) == 1


def test_deeper_prefetching_hides_uneven_samples(loading):
    CHAPTER.run("schedule uneven uneven-run", loading)
    shares = list(loading["smooth"].values())
    assert shares[0] > shares[1] > shares[2] >= shares[3]


def test_persistent_workers_stay(loading):
    CHAPTER.run("persist", loading)  # asserts


@pytest.fixture(scope="module")
def memory():
    namespace = CHAPTER.run("imports store reader reader-take private")
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


def test_a_collection_in_a_worker_copies_unless_frozen(memory):
    CHAPTER.run("freeze freeze-run", memory)
    collected = memory["collected"]
    assert collected["collect"] > collected["freeze_and_collect"] + 10 * 2**20


def test_own_generators_are_copied_and_numpys_is_seeded(loading):
    CHAPTER.run("copied copied-run copied-shown", loading)
    wrong, *_ = loading["draws"]["own generator, copied"]
    assert loading["different"]["own generator, copied"] == 1
    assert loading["different"]["own generator by index"] == 4
    assert loading["different"]["NumPy's global generator"] > 1
    assert 0 <= wrong < 1000


def test_a_stream_arrives_once_for_each_worker_unless_shared_out(loading):
    CHAPTER.run("iterable-run iterable-read", loading)
    assert sorted(loading["streams"][False]) == sorted([*range(6)] * 2)
    assert sorted(loading["streams"][True]) == list(range(6))


def test_a_function_without_a_name_cannot_be_spawned(loading):
    with pytest.warns(UserWarning, match="pickle error"):
        CHAPTER.run("spawn-run spawn-refused", loading)
    CHAPTER.run("spawn-mended", loading)  # asserts
    assert "pickle" in loading["refused"] and "lambda" in loading["refused"]


def test_a_killed_worker_is_named(loading):
    CHAPTER.run("dies-run dies-read", loading)
    assert "worker (pid" in loading["killed"]


def test_arguments_that_contradict_each_other(loading, capsys):
    CHAPTER.run("arguments arguments-empty checked checked-run", loading)
    printed = capsys.readouterr().out
    assert "prefetch_factor option could only be specified in multiprocessing" in printed
    assert "persistent_workers option needs num_workers > 0" in printed
    assert "batches in an epoch: 0" in printed
    with pytest.raises(ValueError, match="batch_size is 8 for 5 samples: allowed are 1 to 5"):
        loading["checked"](loading["empty"])
    whole = torch.utils.data.DataLoader(range(8), batch_size=8, drop_last=True)
    assert loading["checked"](whole) is whole


def test_where_no_process_can_be_started_the_main_one_loads(loading, capsys):
    CHAPTER.run("fork-mend fork-run", loading)
    assert "no 2 workers (Resource temporarily unavailable)" in capsys.readouterr().out
    seen = torch.cat([batch["index"] for batch in loading["slowly"]])
    assert sorted(seen.tolist()) == [*range(16)]


def test_pinning_without_an_accelerator_pins_nothing(loading, capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has an accelerator")
    CHAPTER.run("pin-nothing", loading)
    assert not loading["is_pinned"] and "no accelerator is found" in " ".join(loading["said"])


def test_what_only_a_gpu_measures_makes_its_table(loading):
    """The tables from clocks that stand in for a card's."""
    names = loading | {"batches": {"text": 2**10, "images": 2**20}}
    CHAPTER.run("pinned pinned-run gemm gemm-run", names)
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
    assert names["gemm_seconds"](8, times=1) > 0
    names["gemm_seconds"] = lambda columns: 2.0 if columns % 64 else 1.0
    names |= {"gpt2": names["models"].config("gpt2"), "even": names["models"].config("gpt2")}
    names["even"].vocab_size = 50304
    assert names["gemm_ratios"]() == {"as it is": 1, "padded": 0.5, "as it is, again": 1}


def test_tiles_and_waves_are_counted():
    used = CHAPTER.run("imports tiles")["used"]
    assert used(128 * 40, 128, "T4") == 1  # one whole wave of 40 multiprocessors
    assert used(128 * 41, 128, "T4") == pytest.approx(41 / 80)
    assert used(128 * 40, 129, "T4") == pytest.approx(129 / 256)
    assert all(0 < used(8 * n, 100, "A100-80GB") <= 1 for n in range(1, 99))


def test_padding_a_vocabulary_takes_the_bytes_of_its_rows():
    names = CHAPTER.run("imports")
    runs = []
    for vocabulary in (1025, 1088):
        config = names["models"].config("gpt2-tiny")
        config.vocab_size = vocabulary
        runs.append(simulate(names["Recipe"](config, seq_len=64)).breakdown)
    wide = names["models"].config("gpt2-tiny").hidden_size
    few, many = runs
    assert many["parameters"] - few["parameters"] == 63 * wide * 4
    assert many["optimizer_states"] - few["optimizer_states"] == 63 * wide * 8


def test_padded_logits_enter_the_loss_unless_masked(loading):
    CHAPTER.run("padded-run padded-masked", loading)
    assert loading["logits"].shape[-1] == 1088
    assert loading["after"] > loading["before"] + 1e-3
    assert loading["masked_loss"] == pytest.approx(loading["before"], abs=1e-5)


def test_trainer_and_accelerate_train_the_same(loading):
    CHAPTER.run("trainer trainer-function trainer-run trainer-same", loading)  # asserts
    data = loading["Texts"](loading["ids"][:24])
    order = [i for batch in loading["load"](data, 0) for i in batch["index"].tolist()]
    CHAPTER.run("accelerate", loading | {"same": {(0, 0): (None, order)}})  # asserts


def test_verdicts():
    names = {"find_records": find_records, "verdict": verdict, "because": "of a test"}
    names |= {"fast": None, "products": None, "share": 3e-5}
    CHAPTER.run("imports schedule verdict-ten tiles rows rows-shown", names)
    CHAPTER.run("overview overview-run", names)
    words = {}
    for cell in ("four", "pinned", "sizes", "ten-words", "overview"):
        *body, last = CHAPTER.code[f"verdict-{cell}"].splitlines()
        exec("\n".join([*body, f"final = {last}"]), names)
        words[names["final"].id] = names["final"].word
    assert words == dict.fromkeys(("D2", "D3", "B10", "D1", "B1"), "holds with a condition")
    assert names["saving"][1] < 0.05 < names["saving"][16]
    for padded, word in ((0.5, "holds with a condition"), (1.1, "does not hold")):
        names["products"] = {"padded": padded, "as it is, again": 1.0}
        *body, last = CHAPTER.code["verdict-sizes"].splitlines()
        exec("\n".join([*body, f"final = {last}"]), names)
        assert names["final"].word == word


@pytest.mark.parametrize("number, wrong", [(1, 3), (2, 100), (3, 12345)])
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(loading, capsys, number, wrong):
    if number == 3:
        CHAPTER.run("chance-wrong chance-masked chance-mended chance-compared", loading)
    CHAPTER.run("schedule uneven", loading)
    loading["batches"] = {"images, 64 x 3 x 224 x 224, fp32": 64 * 3 * 224 * 224 * 4}
    CHAPTER.check_exercise(number, wrong, loading, capsys)
