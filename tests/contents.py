"""The pages of the book in the order of its table of contents."""

from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent


def listed_pages(entry=None) -> list[str]:
    """Files that an entry of _toc.yml names, pages below a chapter included; of all of it."""
    entry = entry or yaml.safe_load((ROOT / "_toc.yml").read_text())
    parts = entry.get("parts", [entry])
    below = [e for part in parts for e in part.get("chapters", part.get("sections", ()))]
    first = entry.get("root") or entry["file"]
    return [first, *(page for one in below for page in listed_pages(one))]
