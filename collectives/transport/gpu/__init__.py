"""Messages of device memory: through pinned host memory, or by kernels between GPUs."""
