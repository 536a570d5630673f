"""What CUDA's kernels keep and take that a CPU's do not, by library."""
