"""Data sets, samplers, and a work queue shared by ranks."""
