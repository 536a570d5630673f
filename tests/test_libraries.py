"""What libraries have said of a model is kept, on disk for the catalogue's."""

import pytest
from helpers import refused

from memlab import libraries, models


@pytest.fixture
def told(monkeypatch, tmp_path):
    """What was asked, and a function that makes a `remembered` one as a new process has it."""
    monkeypatch.setenv(libraries.FOLDER, str(tmp_path))
    asked = []

    def heads(model, factor=1):
        asked.append(model)
        return models.config(model).num_attention_heads * factor

    return asked, lambda: libraries.remembered(heads)


def test_a_fact_of_the_catalogue_outlives_the_process(told):
    asked, new_process = told
    for _ in range(2):
        heads = new_process()
        assert heads("gpt2") == heads("gpt2") == 12 and heads("gpt2", 2) == 24
    assert asked == ["gpt2", "gpt2"]


def test_a_fact_of_another_config_is_of_its_values(told):
    asked, new_process = told
    few, many = (models.resized("gpt2", num_attention_heads=n) for n in (4, 8))
    heads = new_process()
    assert [heads(few), heads(many), heads(few)] == [4, 8, 4] and len(asked) == 2
    assert new_process()(few) == 4 and len(asked) == 3


def test_a_fact_is_of_the_releases_that_are_here(told, monkeypatch):
    asked, new_process = told
    new_process()("gpt2")
    monkeypatch.setattr(libraries, "installed", lambda: {"transformers": "6.0.0"})
    assert new_process()("gpt2") == 12 and len(asked) == 2


def test_what_changed_code_says_is_not_kept_for_the_next_process(told, tmp_path, monkeypatch):
    """As where a library of kernels has put its own forward pass into a class of a model."""
    _, new_process = told
    kind = type(models.build("gpt2-tiny"))
    before = list(tmp_path.rglob("*.json"))
    monkeypatch.setattr(kind, "forward", lambda self: None)
    assert new_process()("gpt2") == 12 and list(tmp_path.rglob("*.json")) == before


def test_a_spoilt_file_is_written_anew(told, tmp_path):
    asked, new_process = told
    new_process()("gpt2")
    (file,) = tmp_path.rglob("*.json")
    file.write_text("{")
    assert new_process()("gpt2") == 12 and file.read_text() == "12"


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    folder = tmp_path / "in the way"
    folder.mkdir()
    with pytest.raises(OSError):
        libraries.write_whole(folder, b"content")
    assert list(tmp_path.iterdir()) == [folder]


def test_a_fact_that_cannot_be_kept_is_told_all_the_same(told, monkeypatch):
    def no_room(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(libraries, "write_whole", no_room)
    assert told[1]()("gpt2") == 12


@pytest.mark.parametrize("text, says", [("", "OSError"), ("two\nlines", "two")])
def test_the_first_line_of_an_error(text, says):
    assert libraries.first_line(OSError(text)) == says


def test_an_error_is_not_kept(told):
    asked, new_process = told
    heads = new_process()
    for _ in range(2):
        with refused("unknown model"):
            heads("gpt-9")
