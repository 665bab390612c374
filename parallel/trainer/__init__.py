"""Training program: data, model and engine from settings. Training loop, evaluation, checkpoints."""
