"""Meshes of ranks with named axes, and the communicators along them."""
