"""Contains the back ends. Only the modules in this folder start Taichi, compile CUDA C++ or call torch's compilers."""
