"""What to predict: a `Recipe` describes a training, a `Serving` describes inference."""
