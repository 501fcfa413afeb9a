"""Checks of a whole server through HTTP. `benchmarks.gpu.server` has their order."""
