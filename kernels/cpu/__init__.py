"""The CPU's kernels: C++ of this package, compiled at first use for the best instruction set of the machine.

`library` chooses and compiles. The C++ is in `native/`; `attention`, `elementwise`, `layer`, `linear`,
`mailbox`, `moved_attention` and `page_copy` are the checked wrappers of the C++ of their name. Where nothing
can be compiled, torch computes the same (`kernels.attention`, `torch.nn.functional`).
"""
