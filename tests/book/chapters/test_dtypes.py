"""Number formats compared: limits, steps drawn, bytes of a built model, estimated speeds."""

import torch

from memlab import Recipe
from memlab.book.chapters import dtypes


def test_what_does_not_fit_here_is_not_built(monkeypatch, capsys):
    monkeypatch.setattr(dtypes, "room_on", lambda device: 0)
    built = dtypes.built_in_formats("distilbert-tiny", torch.device("cpu"))
    assert built["measured"].isna().all() and (built["predicted peak"] >= built["stays"]).all()
    assert capsys.readouterr().out.count("distilbert-tiny is too large") == 4


def test_tf32_is_faster_and_its_switch_is_put_back():
    before = torch.backends.cuda.matmul.allow_tf32
    recipe = Recipe("bert-large-tiny", batch_size=64, seq_len=512)
    assert dtypes.tf32_speedup(recipe, "A100-80GB") > 1
    assert torch.backends.cuda.matmul.allow_tf32 == before
