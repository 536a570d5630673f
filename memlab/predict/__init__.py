"""Predictions of what a recipe or a serving needs on a GPU, without running it there."""
