"""Benchmarks of training: workloads, metrics files, plots, and a PyTorch baseline."""
