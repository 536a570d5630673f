"""Loops of others: what is kept is what the simulation says, and how near that is to their runs."""

import dataclasses

import pytest

from memlab import Recipe, find_gpu, models, simulate
from memlab.evidence import loops
from memlab.evidence.accuracy import compare_records
from memlab.evidence.records import FOLDER, find_records, load

KEPT = loops.kept_predictions()
T4 = find_records("published", "T4", loop="fitcheck")
SAID = KEPT["runs"]["published-fitcheck-t4.json"]


def errors(base, kind):
    """The sizes of the kept predictions' errors, the smallest first."""
    figure = f"peak_{kind}_bytes"
    runs = [run for run in T4 if run.recipe["base"] == base]
    return sorted(abs(SAID[run.name][figure] / run.figures[figure] - 1) for run in runs)


@pytest.mark.parametrize(
    ("base", "attention"), [("none", "eager"), ("none", "sdpa"), ("nf4", "eager"), ("nf4", "sdpa")]
)
def test_the_simulation_says_what_is_kept(base, attention):
    like = {"base": base, "attention": attention}
    some = find_records(loop="fitcheck", **like)
    smallest = min(some, key=lambda run: run.figures["peak_allocated_bytes"])
    said = loops.simulate_loop(smallest, find_gpu("T4"))
    kept = SAID[smallest.name]
    assert said.peak_allocated == kept["peak_allocated_bytes"]
    assert said.peak_reserved == kept["peak_reserved_bytes"]
    assert list(said.reserved_range or ()) == (kept["reserved_range_bytes"] or [])


def test_and_of_a_run_in_memlabs_own_loop():
    run = find_records("published", "V100")[0]
    said = simulate(Recipe(**run.recipe), "V100")
    kept = KEPT["runs"]["published-source-001.json"][run.name]
    assert said.peak_allocated == kept["peak_allocated_bytes"]
    assert said.peak_reserved == kept["peak_reserved_bytes"]


def test_every_published_run_has_a_prediction():
    published = {path.name: load(path) for path in FOLDER.glob("published-*.json")}
    names = {file: {run.name for run in runs} for file, runs in published.items()}
    assert names == {file: set(said) for file, said in KEPT["runs"].items()}
    assert {run.loop for runs in published.values() for run in runs} == {"", *loops.LOOPS}


def test_without_a_base_allocated_is_exact_and_reserved_nearly():
    allocated, reserved = errors("none", "allocated"), errors("none", "reserved")
    assert len(allocated) == 20
    assert allocated[-1] < 1e-6
    assert reserved[10] < 0.005 and reserved[-1] < 0.01


def test_with_nf4_allocated_is_near_and_reserved_a_matter_of_loading():
    allocated, reserved = errors("nf4", "allocated"), errors("nf4", "reserved")
    assert len(allocated) == 41
    assert allocated[20] < 0.001 and allocated[38] < 0.003 and allocated[-1] < 0.005
    assert reserved[20] < 0.03 and reserved[-1] < 0.16


def test_a_run_with_a_loop_is_predicted_by_it_and_as_todays_kernels(monkeypatch):
    run = T4[0]
    asked = []

    def said(run, card):
        asked.append((run, card))
        return footprint

    footprint = loops.simulate_loop(small(run), find_gpu("T4"))
    monkeypatch.setattr("memlab.evidence.accuracy.simulate_loop", said)
    found = compare_records([run])
    assert [(run, card.name) for run, card in asked] == [(T4[0], "T4")]
    assert {one.figure for one in found} == {"allocated", "reserved"}
    assert {(one.against, one.predictor) for one in found} == {
        ("published, Tesla T4", "loop of fitcheck")
    }
    near = dataclasses.replace(found[0], predicted=98, recorded=100, bounds=None)
    assert near.figure == "allocated" and near.missed
    assert not dataclasses.replace(near, old=True).missed


def small(run):
    """The run on the tiny twin of its model."""
    tiny = models.twin(run.recipe["model"]).to_dict()
    return dataclasses.replace(run, recipe=run.recipe | {"model": tiny, "seq_len": 32})


def test_the_loop_is_not_memlabs_own():
    """The same recipe: fp32 weights in memlab's loop, fp16 ones in theirs."""
    run = small(next(run for run in T4 if run.recipe["base"] == "none"))
    theirs = loops.simulate_loop(run, find_gpu("T4"))
    assert theirs.breakdown["parameters"] < 0.6 * 4 * theirs.parameters
    assert theirs.trainable_parameters < theirs.parameters


def test_a_loop_that_is_not_known_is_refused_in_its_row():
    unknown = dataclasses.replace(T4[0], loop="nobody's")
    assert {one.refused for one in compare_records([unknown])} == {
        'loop is "nobody\'s": known are ' + ", ".join(loops.LOOPS)
    }


def test_a_model_as_an_object():
    values = T4[0].recipe["model"]
    recipe = Recipe(**T4[0].recipe)
    assert recipe.model.hidden_size == values["hidden_size"]
    assert recipe.model_name == values["model_type"] and recipe.task == "causal-lm"
    with pytest.raises(ValueError, match="model: model_type is 'none': allowed are"):
        Recipe(model={"model_type": "none"})
    with pytest.raises(ValueError, match="model: not a valid llama config"):
        models.config({"model_type": "llama", "hidden_size": "wide"})
