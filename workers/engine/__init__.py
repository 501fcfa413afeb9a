"""The engine: a transformer over paged KVCache, in torch, on the CPU's kernels or on the GPU's."""
