"""The engine: a transformer over paged KVCache, computed by torch, by the CPU's kernels or by the GPU's."""
