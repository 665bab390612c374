"""Checkpoints: logical tensors in safetensors files, independent of the layout that wrote them."""
