"""The real PyTorch code: the one training loop, generation, quantized bases, sharding."""
