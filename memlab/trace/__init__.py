"""Allocation logs: recorded from training code, scaled to other sizes, replayed by an allocator.

`tracer` and `ledger` record what a run allocates and frees. `log`, `layered`, `symbols` and `trace`
turn recordings into the log for any batch, length and number of layers. `allocator` serves a log as
PyTorch's caching allocator would.
"""
