"""The CPU's kernels: C++ of this package, compiled at first use for the best instruction set of the machine.

`library` chooses and compiles. The C++ is in `native/`; the module of the same name here is its checked
wrapper. Where nothing can be compiled, torch computes the same (`kernels.attention`, `torch.nn.functional`).
"""
