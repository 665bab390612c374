"""Scales and zero points from ranges. Codebooks fitted to data."""
