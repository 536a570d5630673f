"""The simulated GPU: what CUDA, its kernels and its libraries do, on a machine without a GPU."""
