"""Planner: memory, FLOPs and layouts of large models on clusters, from numbers alone. No MPI, no arrays."""
