"""Check the prose of the pages, the README and memlab's docstrings against the rules of style.

Pages are checked for every rule, docstrings only for "a" in place of "per". Code, math, tables,
quotes (the claims of sources) and HTML tags do not count as prose. Each hit is printed with its
sentence, which must then be rewritten.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

MOST_WORDS = 30
COUNTED = (
    r"(?:\d s|bits?|bytes?|[KMGT]i?B|numbers?|FLOPs?|operations|tokens?|texts|samples|sequences?|"
    r"micro-batches|kernels|seconds|ms|row|column|line|dot|bar|copy|scale)"
)
EACH = (
    r"(?:block|card|element|GPU|head|layer|method|micro-batch|model|number|parameter|rank|recipe|"
    r"row|run|sample|second|sequence|step|token|user|value|weight)"
)
RULES = {
    "a for per": rf"\b{COUNTED} an? {EACH}\b",
    "of which": r"\bof which\b",
    "told": r"\btold\b",
    "stands": r"\bst(?:and|ands|ood) (?:in|on|beside)\b",
    "beside": r"\bbeside\b",
    "others as a noun": r"(?<!the )\bothers(?:['’]| have| are| do| say)|\b(?:by|of|from) others\b",
    "of it": r"(?<!some )(?<!all )(?<!each )(?<!one )(?<!most )\bof (?:it|them)(?=[.,;:)])",
}
DIRECTIVE = re.compile(r"(?sm)^```\{(?:glossary|figure)\}.*?\n(.*?)^```$")
NO_PROSE = re.compile(
    r"(?sm)^ *(?P<fence>`{3,}|~{3,}).*?^ *(?P=fence)|\$\$.*?\$\$|<!--.*?-->|<[^>]+>|https?://\S+"
    r"|^\s*\|.*?$|^\s*>.*?$|^ *:{3,}.*?$|^\s*:\w+:.*?$|^\(\S+\)=$",
)
CITED = re.compile(r"(?:\{\w+\})?`[^`]+`|\$[^$\n]+\$|“[^”]*”|\"[^\"\n]*\"")
END = re.compile(r"(?m)(?<=[.!?])[)*\"”]*\s+|\n\s*\n|\n\s*(?:[-*:]|\d+\.|#+) |^#+ ")


def sentences(markdown: str) -> Iterator[str]:
    prose = re.sub(r"\]\([^)]*\)", "]", DIRECTIVE.sub(r"\1", markdown))  # a link is its text
    for sentence in END.split(CITED.sub("code", NO_PROSE.sub("", prose))):
        yield " ".join(sentence.split())


def passages(path: Path) -> Iterator[tuple[str, str]]:
    if path.suffix == ".ipynb":
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "markdown":
                yield cell["id"], "".join(cell["source"])
    elif path.suffix == ".md":
        yield "", path.read_text()
    else:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield getattr(node, "name", ""), ast.get_docstring(node) or ""


def broken_rules(sentence: str, page: bool) -> Iterator[str]:
    for rule, pattern in RULES.items():
        if (page or rule == "a for per") and re.search(pattern, sentence, re.IGNORECASE):
            yield rule
    if page and len(re.findall(r"[A-Za-z][\w'’-]*", sentence)) > MOST_WORDS:
        yield f"more than {MOST_WORDS} words"


if __name__ == "__main__":
    hits = [
        f"{path} {place}: {rule}: {sentence}"
        for pattern in ("README.md", "CONTRIBUTING.md", "chapters/*.[im]*", "memlab/**/*.py")
        for path in sorted(Path().glob(pattern))
        for place, text in passages(path)
        for sentence in sentences(text)
        for rule in broken_rules(sentence, page=path.suffix != ".py")
    ]
    sys.exit("\n".join(hits) or 0)
