"""Trained models in few bits: what goes into layers is watched, their weights are rounded, and both is measured."""
