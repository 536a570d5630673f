"""What a recipe's fields say of themselves reaches the docstring, the options and the grid."""

import dataclasses

import pytest

from memlab import Recipe, models
from memlab.cli import main

FIELDS = dataclasses.fields(Recipe)


def test_the_docstring_and_the_options_name_every_field_and_every_choice(capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    options = " ".join(capsys.readouterr().out.split()).replace("- ", "-")
    for field in FIELDS:
        assert f"\n    {field.name}: " in Recipe.__doc__
        off = field.metadata["off"]
        option = off[0] if off else field.name
        assert f"--{option.replace('_', '-')}" in options
        for choice in field.metadata["choices"]:
            if isinstance(choice, str):
                assert choice in Recipe.__doc__ and choice in options


def test_the_tasks_are_those_of_the_models():
    (task,) = (field for field in FIELDS if field.name == "task")
    assert all(name in task.metadata["help"] for name in models.TASKS)
