"""Command-line programs for training."""
