"""Scales and zero points from ranges; codebooks fitted to data."""
