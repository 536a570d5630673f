"""Which recipe trains a model on a card: what there is, the search, the answer."""
