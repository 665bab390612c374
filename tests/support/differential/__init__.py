"""Differential tests: a table of public options x layouts x meshes, and random programs over the engine."""
