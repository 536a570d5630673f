"""What a recipe needs on a card, without running it there."""
