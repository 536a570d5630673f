"""The PyTorch code that is simulated: training loop, generation, quantized bases, sharding."""
