"""Rules for the memory that CUDA kernels keep or allocate and CPU kernels do not, by library."""
