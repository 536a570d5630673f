"""The planner: which recipes could train a model on a GPU, the search among them, the answer."""
