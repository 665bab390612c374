"""Programs of ranks that share a GPU, or have access to each other's."""
