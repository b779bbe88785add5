"""The benchmark of the kernels. Every implementation is verified and timed, and the results become tables and figures."""
