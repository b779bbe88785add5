"""The back ends. Only the modules here start Taichi, compile CUDA C++ or call torch's compilers."""
