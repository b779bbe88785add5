"""The machine that kernels run on: threads, memory allocator, free memory, the CPU's native dtypes, measured speed limits."""
