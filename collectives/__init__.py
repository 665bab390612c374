"""Collective communication for NumPy and CuPy arrays, as schedules over MPI point-to-point."""
