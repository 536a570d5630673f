"""What a footprint says of itself."""

from memlab.footprint import Footprint

MiB = 2**20
BREAKDOWN = {"parameters": 3 * MiB, "activations": 2 * MiB, "workspaces": MiB, "rounding": 512}


def example(**more):
    return Footprint(sum(BREAKDOWN.values()), 8 * MiB, BREAKDOWN, "backward", **more)


def test_print_is_in_mib_and_names_the_phase():
    text = str(example(context=100 * MiB))
    assert "3.0 MiB" in text and "in backward" in text and "100.0 MiB" in text
    assert "device used" not in text  # not known here
