"""Training on NumPy and CuPy arrays with MPI alone: data-parallel, ZeRO, parameter server, pipeline."""
