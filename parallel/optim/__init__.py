"""Optimizers, learning-rate schedules, loss scaling, gradient norm."""
