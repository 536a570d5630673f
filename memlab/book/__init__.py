"""Helpers that the chapters share: figures and tables, texts, lessons, exercises, claims."""

import os

import lazy_loader

# A saved notebook shows "model not found" in place of a progress bar that is a widget. transformers
# and datasets read these variables when they are imported, and most chapters import this first.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

# __init__.pyi lists the names and their modules. A name is imported at its first use, because most
# of them import torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
