"""The machine that kernels run on: threads, allocator, memory, native dtypes of its CPU, measured limits."""
