"""The machine that kernels run on: its threads, allocator, memory, what its CPU multiplies, its measured limits."""
