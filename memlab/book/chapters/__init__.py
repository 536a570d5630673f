"""What one chapter uses alone."""
