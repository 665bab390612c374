"""Command-line programs for quantisation."""
