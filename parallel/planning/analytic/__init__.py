"""Planner: memory, FLOPs and layouts of large models on clusters, from numbers alone; no MPI, no arrays."""
