"""Words by which readers search a page that has another name for them.

`search_words` of `_config.yml` names the page and its words. They become entries of the index,
which the search looks through before the text; on the page itself nothing shows.
"""

from sphinx import addnodes
from sphinx.errors import ConfigError


def add_entries(app, doctree):
    """An index entry a word at the top of the page."""
    page = app.env.docname
    words = app.config.search_words.get(page, ())
    if words:
        target = f"index-{page.rpartition('/')[2]}"
        doctree.next_node()["ids"].append(target)
        entries = [("single", word, target, "main", None) for word in words]
        doctree.insert(0, addnodes.index(entries=entries))


def check_pages(app, env):
    """Every page that is named is one."""
    if unknown := set(app.config.search_words) - env.found_docs:
        raise ConfigError(f"search_words names {sorted(unknown)}, which are no pages of the book")


def setup(app):
    app.add_config_value("search_words", {}, "env")
    app.connect("doctree-read", add_entries)
    app.connect("env-updated", check_pages)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
