"""The CPU's kernels: C++ of this package, compiled at first use for the best instruction set of the machine.

`library` chooses and compiles, `attention`, `linear` and `elementwise` are the checked wrappers, each beside
its C++ file. Where nothing can be compiled, torch computes the same (`kernels.attention`,
`torch.nn.functional`).
"""
