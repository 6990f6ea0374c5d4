"""A budget of the bytes that PyTorch's caching allocator for CUDA reserves (`reserved.py`)."""
