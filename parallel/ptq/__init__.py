"""Post-training quantisation of models: calibration, rounding, evaluation."""
