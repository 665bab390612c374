"""Optimizers, learning-rate schedules, mixed precision and loss scaling, gradient clipping."""
