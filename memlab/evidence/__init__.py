"""Runs on real GPUs, recorded and published, and how near the predictions come to them."""
