"""Quantisation specs: formats, granularity, scales, presets."""
