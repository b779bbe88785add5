"""The benchmark of the kernels: verifies every implementation, then times it; makes tables and figures."""
