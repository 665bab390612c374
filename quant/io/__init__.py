"""File formats for quantised arrays: safetensors and ggml blocks."""
