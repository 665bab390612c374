"""Training program: from settings to the last step."""
