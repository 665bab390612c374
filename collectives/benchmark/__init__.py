"""Benchmarks of collectives: cases, timing, result rows, plots."""
