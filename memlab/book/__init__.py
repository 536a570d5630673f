"""What the chapters share: figures and tables, texts, lessons, exercises, claims, panels."""

import os

import lazy_loader

# A notebook that was saved with the widget of a bar says "model not found" in its place. Read by
# transformers and datasets when they are imported, which most chapters do after this.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

# The names, and where each lives, are those of the stub beside; a name is loaded when it is first
# asked for, as most bring torch along.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
