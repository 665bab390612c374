"""Command-line programs for collectives."""
