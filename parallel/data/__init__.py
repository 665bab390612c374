"""Data sets, samplers and the work queue."""
