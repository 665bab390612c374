"""Optimizer updates of vectors, compiled: `updates.c` for NumPy arrays, `device_updates` for CuPy arrays."""
