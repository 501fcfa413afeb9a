"""The CPU's kernels: C++ of this package, compiled at first use for the best instruction set of the machine.

`library` chooses and compiles. The C++ is in `native/`; a module here is the checked wrapper of the C++ of
its name. Where nothing can be compiled, torch computes the same (`kernels.attention`, `torch.nn.functional`).
"""
