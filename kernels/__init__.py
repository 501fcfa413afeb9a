"""Compute kernels: attention over paged KVCache, and copies between device pages and pool pages."""

# Some `transformers` versions probe a package of this name for its version.
__version__ = "0.0.0"
