"""The doors of memlab and of its book: short, lazy, and clear about what they do not have."""

import importlib.util
import os
import re

import pytest
from contents import ROOT
from helpers import run_python

import memlab
from memlab import book, cli, libraries


@pytest.mark.parametrize("package", [memlab, book])
def test_every_name_leads_to_something_with_a_name_of_its_own(package):
    assert len(package.__all__) <= 27
    for name in package.__all__:
        assert getattr(package, name) is not None


def test_every_name_and_every_command_has_its_place_on_the_pages():
    """But a unit and the two catalogues, which are modules."""
    pages = ROOT / "chapters"
    names = re.findall(r"^memlab\.(?:\w+\.)*(\w+)$", (pages / "memlab-api.md").read_text(), re.M)
    assert set(memlab.__all__) - {"MiB", "gpus", "models"} <= set(names)
    commands = re.findall(r"{command} (\w+)", (pages / "memlab-commands.md").read_text())
    assert commands == [module.__name__.rpartition(".")[2] for module in cli.COMMANDS]


def test_an_unknown_name_is_told():
    with pytest.raises(AttributeError, match="No memlab attribute simulat"):
        memlab.simulat  # noqa: B018


def test_a_question_for_help_loads_no_torch():
    code = "import sys, memlab.cli, memlab.spec.recipe; print('torch' in sys.modules)"
    assert run_python(code).stdout == "False\n"


ASKED = """
import sys
from memlab import cli
for question in sys.argv[1:]:
    cli.main(question.split())
print({"torch", "transformers"} & sys.modules.keys() or "neither", file=sys.stderr)
"""
QUESTIONS = (
    "plan --model qwen3-0.6b --gpu RTX-4090 --ways full,qlora --precisions bf16-amp",
    "simulate --model llama-3.2-1b --gpu T4 --precision fp16-amp --lora-rank 8 --base nf4",
    "simulate --model gpt2-large --gpu L4 --largest batch-size",
)


def test_of_the_catalogue_the_second_answer_takes_no_torch(tmp_path):
    """Its traces come with memlab, or are kept; so is what transformers says of the model."""
    around = os.environ | {libraries.FOLDER: str(tmp_path)}
    first, second = (run_python(ASKED, *QUESTIONS, env=around) for _ in range(2))
    assert first.stdout == second.stdout != ""
    assert "neither" not in first.stderr and second.stderr.endswith("neither\n")


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not here")
def test_what_is_imported_says_nothing_and_brings_no_compiler():
    """bitsandbytes comes with peft, torchao with transformers."""
    code = "import sys; from memlab import models; models.build('gpt2-tiny')"
    code += "; from memlab.workloads.training import import_peft; import_peft()"
    code += "; names = 'torchao bitsandbytes torch._inductor.compile_fx'"
    code += "; print(*[name in sys.modules for name in names.split()])"
    done = run_python(code)
    assert done.stdout == "True True False\n"
    for said in ("torchao", "register_constant", "Failed to load"):
        assert said not in done.stderr
