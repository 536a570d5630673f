"""Sphinx extension: search words for pages that use other words themselves.

`search_words` in `_config.yml` maps a page to words. They become entries of the index, which the
search looks up before the text. The page itself does not show them.
"""

from sphinx import addnodes
from sphinx.errors import ConfigError


def add_entries(app, doctree):
    """Add one index entry per search word at the top of the page."""
    page = app.env.docname
    words = app.config.search_words.get(page, ())
    if words:
        # An index entry needs a target in the page; the first node gets its id.
        target = f"index-{page.rpartition('/')[2]}"
        doctree.next_node()["ids"].append(target)
        entries = [("single", word, target, "main", None) for word in words]
        doctree.insert(0, addnodes.index(entries=entries))


def check_pages(app, env):
    """Raise ConfigError for a page in `search_words` that the book does not have."""
    if unknown := set(app.config.search_words) - env.found_docs:
        raise ConfigError(f"search_words names {sorted(unknown)}, which are no pages of the book")


def setup(app):
    app.add_config_value("search_words", {}, "env")
    app.connect("doctree-read", add_entries)
    app.connect("env-updated", check_pages)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
