"""Runs on real cards, recorded and published, and how near the predictions come."""
