"""Benchmarks of training: workloads, metrics, plots, the PyTorch opponent."""
