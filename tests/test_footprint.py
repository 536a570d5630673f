"""What a footprint says of itself."""

import json

from memlab.footprint import Footprint, Timeline
from memlab.units import mib

MiB = 2**20
BREAKDOWN = {"parameters": 3 * MiB, "activations": 2 * MiB, "workspaces": MiB, "rounding": 512}


def example(**more):
    return Footprint(sum(BREAKDOWN.values()), 8 * MiB, BREAKDOWN, "backward", **more)


def test_tensors_are_without_workspaces_and_rounding():
    assert example().peak_tensors == 5 * MiB


def test_as_dict_is_json_in_bytes():
    values = json.loads(json.dumps(example(parameters=7).as_dict()))
    assert sum(values["breakdown"].values()) == values["peak_allocated"]
    assert values["parameters"] == 7 and values["context"] is None


def test_print_is_in_mib_and_names_the_phase():
    text = str(example(context=100 * MiB))
    assert "3.0 MiB" in text and "in backward" in text and "100.0 MiB" in text
    assert "device used" not in text  # not known here


def test_mib_is_a_power_of_two():
    assert mib(1536 * 1024) == "1.5 MiB"
    assert mib(None) == "—"


def test_spans_of_a_timeline():
    line = Timeline(["forward", "forward", "backward"], {})
    assert line.spans() == [("forward", 0, 2), ("backward", 2, 3)]
