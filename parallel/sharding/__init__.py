"""Operators, sequences and experts divided over the axes of a mesh of ranks."""
