"""What the chapters share: figures and tables, texts, lessons, exercises, claims, panels."""

import lazy_loader

# The names, and where each lives, are those of the stub beside; a name is loaded when it is first
# asked for, as most bring torch along.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
