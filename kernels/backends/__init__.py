"""The back ends: the only place that starts Taichi, compiles CUDA C++ or calls torch's compilers."""
