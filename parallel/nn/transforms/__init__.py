"""Transforms of models for training: few-bit products, fake quantisation and pruning, as wrappers of operators."""
