"""The log of memory: what is born and dies, at any depth, and the allocator that serves it."""
