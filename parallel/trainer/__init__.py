"""Training program: data, model and engine from settings; training loop, evaluation, checkpoints."""
