"""Decoder layers, implemented three times: torch as the reference, the CPU's kernels, the GPU's."""
