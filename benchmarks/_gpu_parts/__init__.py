"""The parts of gpu_check. A file has the part of its name, or several that share code."""
