"""Every page that _toc.yml names has come out: a build without pages is no book.

python tools/count_pages.py
"""

import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent


def named(entry) -> list[str]:
    """The files of a table of contents, in order."""
    if isinstance(entry, list):
        return [file for one in entry for file in named(one)]
    own = [entry[key] for key in ("root", "file") if key in entry]
    below = [entry[key] for key in ("parts", "chapters", "sections") if key in entry]
    return own + named(below)


def missing(toc: dict, html: Path) -> list[str]:
    """The files of a table of contents that have no page."""
    return [file for file in named(toc) if not (html / f"{file}.html").is_file()]


if __name__ == "__main__":
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    lacking = missing(toc, ROOT / "_build" / "html")
    print(f"{len(named(toc)) - len(lacking)} of {len(named(toc))} pages have come out")
    sys.exit(f"without a page: {', '.join(lacking)}" if lacking else 0)
