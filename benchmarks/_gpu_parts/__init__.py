"""The parts of gpu_check. Each file has the part of that name, or several parts that share code."""
