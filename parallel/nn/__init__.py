"""Models as operators with explicit motions forward and backward, on NumPy and CuPy arrays. Knows no MPI."""
