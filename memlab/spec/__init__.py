"""What is asked: a recipe of a training, a serving of inference."""
