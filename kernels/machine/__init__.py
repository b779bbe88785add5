"""Contains modules about the machine: threads, memory, the allocator, the CPU's native dtypes and measured speed limits."""
