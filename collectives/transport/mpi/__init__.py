"""Messages between nodes over MPI, their speed, reductions of integers, and detection of CUDA-aware libraries."""
