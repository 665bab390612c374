"""Tensor parallelism: operators cut into shards along a mesh axis, by a table of placements."""
