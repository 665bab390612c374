"""Checkpoints: whole tensors in safetensors files, independent of the sharding and number of ranks that wrote them."""
