"""Sphinx extension: the API reference, generated from memlab's source.

The directive `{api}` documents Python objects, and `{command}` the options of a command. Docstrings
and help texts are Markdown, like the pages; autodoc and sphinx-argparse would read them as
reStructuredText. A line of a docstring that begins with names and a colon describes those
parameters, and becomes an item of a list.
"""

import argparse
import ast
import dataclasses
import inspect
import re
import textwrap
from importlib import import_module
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

from memlab.cli import parser

NO_DEFAULT = (None, False, True, "", [], argparse.SUPPRESS)
DESCRIBED = re.compile(r"^([a-z]\w*(?:, [a-z]\w*)*)(?= ?(?:\([^)]*\))?: )")


def signature(function):
    """The signature as the source has it, without `self`."""
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if node.args.args and node.args.args[0].arg in ("self", "cls"):
        node.args.args.pop(0)
    for values in (node.args.defaults, node.args.kw_defaults):
        for i, value in enumerate(values):  # show the value of a constant, not its name
            known = function.__globals__.get(getattr(value, "id", None))
            if isinstance(known, (int, float, str)):
                values[i] = ast.Constant(known)
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(node.args)}){result}".replace("'", '"')


def as_markdown(docstring):
    # "name: text" at the start of a line becomes "- **name**: text".
    lines = (DESCRIBED.sub(r"- **\1**", line) for line in inspect.cleandoc(docstring).splitlines())
    return "\n".join(lines)


def described(name, thing):
    """The Markdown for a function, or for a class with its public methods and properties."""
    if not inspect.isclass(thing):
        return directive("function", name + signature(thing), as_markdown(thing.__doc__))
    made = not dataclasses.is_dataclass(thing)  # a dataclass's docstring lists its fields
    given = signature(thing.__init__) if made else ""
    members = [member(*pair) for pair in vars(thing).items() if not pair[0].startswith("_")]
    body = "\n\n".join([as_markdown(thing.__doc__), *filter(None, members)])
    return directive("class", name + given.removesuffix(" -> None"), body)


def member(name, thing):
    if isinstance(thing, property) and thing.__doc__:
        return directive("property", name, as_markdown(thing.__doc__), ":::")
    if inspect.isfunction(thing) and thing.__doc__:
        return directive("method", name + signature(thing), as_markdown(thing.__doc__), ":::")
    return None


def directive(kind, head, body, fence="::::"):
    return f"{fence}{{py:{kind}}} {head}\n\n{body}\n{fence}\n"


def has_default(action):
    """Whether a default is worth showing; a path is not, because it depends on the machine."""
    return action.default not in NO_DEFAULT and not isinstance(action.default, Path)


def options(command):
    """The Markdown list of a command's options, in the words of `--help`."""
    # argparse has no public way to list its commands and options.
    commands = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    (told,) = (a.help for a in commands._choices_actions if a.dest == command)
    asked = commands.choices[command]
    helps = argparse.HelpFormatter(asked.prog)
    rows = [
        f"- `{helps._format_action_invocation(action)}`: {helps._expand_help(action)}"
        + " (required)" * action.required
        + f" (default {action.default})" * has_default(action)
        for action in asked._actions
        if action.help != argparse.SUPPRESS and "--help" not in action.option_strings
    ]
    return "\n".join([f"{told[0].upper()}{told[1:]}.", "", *rows])


class Written(Directive):
    """Base of directives that are replaced by the Markdown of their method `markdown`."""

    def run(self):
        # The parser of the page is MyST, so the generated text may use Markdown and directives.
        section = nodes.Element()
        made = StringList(self.markdown().splitlines(), source="")
        self.state.nested_parse(made, self.content_offset, section)
        return section.children


class Api(Written):
    """The directive `{api}`: its content is one dotted name per line."""

    has_content = True

    def markdown(self):
        names = [line.strip() for line in self.content]
        return "\n".join(described(name, found(name)) for name in names)


class Command(Written):
    required_arguments = 1

    def markdown(self):
        return options(self.arguments[0])


def found(name):
    module, _, last = name.rpartition(".")
    return getattr(import_module(module), last)


def setup(app):
    app.add_directive("api", Api)
    app.add_directive("command", Command)
    return {"parallel_read_safe": True}
