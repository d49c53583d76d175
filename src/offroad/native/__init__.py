"""CPU kernels in C: compiled for the machine when a model is prepared, cached, and called through ctypes."""
