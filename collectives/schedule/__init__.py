"""Schedule language: steps on numbered chunks, the meaning of each collective, topologies, transforms."""
