"""The doors of memlab and of its book: short, lazy, and clear about what they do not have."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import memlab
from memlab import book


@pytest.mark.parametrize("package", [memlab, book])
def test_every_name_leads_to_something_with_a_name_of_its_own(package):
    assert len(package.__all__) <= 26
    for name in package.__all__:
        assert getattr(package, name) is not None


@pytest.mark.parametrize("package", [memlab, book])
def test_type_checkers_are_told_of_every_name_where_it_lives(package):
    of_package, told = package.__name__, {}
    for node in ast.parse(Path(package.__file__).read_text()).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for line in node.body:
                (alias,) = line.names
                assert alias.asname == alias.name  # which says that it is for others, too
                told[alias.name] = line.module
    homes = {name: f"{of_package}.{home}" for name, home in package._HOMES.items()}
    assert told == dict.fromkeys(package.__all__, of_package) | homes


def test_an_unknown_name_is_told():
    with pytest.raises(AttributeError, match="'memlab' has no attribute 'simulat'"):
        memlab.simulat  # noqa: B018


def test_a_question_for_help_loads_no_torch():
    code = "import sys, memlab.cli, memlab.spec.recipe; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not here")
def test_what_is_imported_says_nothing_and_brings_no_compiler():
    """bitsandbytes comes with peft, torchao with transformers."""
    code = "import sys; from memlab import models; models.build('gpt2-tiny')"
    code += "; from memlab.workloads.training import import_peft; import_peft()"
    code += "; names = 'torchao bitsandbytes torch._inductor.compile_fx'"
    code += "; print(*[name in sys.modules for name in names.split()])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True True False\n"
    for said in ("torchao", "register_constant", "Failed to load"):
        assert said not in done.stderr
