"""Models as operators with explicit forward and backward passes, on NumPy and CuPy arrays, without MPI."""
