"""A program that compiles the kernels for Hopper on a machine without a GPU, as their wrappers launch them.

    python -m tests.kernels.cuda.compiling

It prints a JSON object for each kernel: its name, its parameters, registers and stack bytes of a thread,
bytes of shared memory, and the kinds of matrix instructions that it has. It cannot be used with
TRITON_INTERPRET.
"""

import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from kernels.cuda import hopper_prefill, kv_quantise, page_copy
from kernels.cuda.decode_attention import decode_attention
from kernels.cuda.kv_write import TokenSlots, rotate_and_write
from kernels.cuda.prefill_attention import default_tile, prefill_attention
from kernels.cuda.rms_norm import add_rms_norm, rms_norm
from kernels.cuda.silu_mul import silu_mul
from kernels.cuda.skinny_linear import Norm, skinny_linear
from kernels.cuda.spans import SPAN_FIELDS, Spans
from kernels.head_norms import HeadNorms

HOPPER = GPUTarget("cuda", 90, 32)
NUM_KV_HEADS = 8
_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}
_CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"


class Compiler:
    """A replacement of `JITFunction.run` that compiles instead of launching."""

    def __init__(self) -> None:
        self.case = ""

    def run(self, kernel: JITFunction, *args: Any, grid: object, warmup: bool, **named: Any) -> None:
        parameters = {parameter.name: parameter for parameter in kernel.params}
        values = dict(zip(kernel.arg_names, args, strict=False))
        values.update({name: value for name, value in named.items() if name in parameters})
        options = {name: value for name, value in named.items() if name not in parameters}
        signature, constants, attributes = {}, {}, {}
        for index, name in enumerate(kernel.arg_names):
            value = values[name]
            if parameters[name].is_constexpr:
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, TensorDescriptor):
                element = _POINTERS[value.base.dtype][1:]
                signature[name] = f"tensordesc<{element}{value.block_shape},{value.layout!r}>"
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:
                is_tensor = isinstance(value, torch.Tensor)
                signature[name] = _POINTERS[value.dtype] if is_tensor else "i32"
                # As the launcher finds out.
                if is_tensor or (value % 16 == 0 and not parameters[name].do_not_specialize):
                    attributes[(index,)] = [["tt.divisibility", 16]]
        source_of = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
        source = source_of(kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=HOPPER, options=options)
        products = [name for name in ("wgmma", "mma.sync") if name in compiled.asm["ptx"]]
        report = {
            "kernel": kernel.__name__,
            "case": self.case,
            **resources(compiled.asm["cubin"]),
            "shared_bytes": compiled.metadata.shared,
            "products": products,
        }
        print(json.dumps(report))


def resources(cubin: bytes) -> dict[str, int]:
    """Return the registers and stack bytes of a thread, for the only kernel of a cubin file."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_CUOBJDUMP, "--dump-resource-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fields = dict(field.split(":") for field in shown.split() if field.count(":") == 1 and field[-1] != ":")
    return {"registers": int(fields["REG"]), "stack_bytes": int(fields["STACK"])}


def attention(dtype: torch.dtype, group: int, head_dim: int, page_size: int, window: int | None) -> None:
    kv_layer = torch.zeros(2, NUM_KV_HEADS, 2, page_size, head_dim, dtype=dtype)
    query = torch.zeros(1, NUM_KV_HEADS * (group + 2), head_dim, dtype=dtype)[:, : NUM_KV_HEADS * group]
    out, lse = torch.zeros(query.shape, dtype=dtype), torch.zeros(query.shape[:2])
    spans = Spans(torch.zeros(1, SPAN_FIELDS, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    for num_splits in (1, 8):
        decode_attention(query, kv_layer, spans, 0.1, num_splits, out, sliding_window=window)
    prefill_attention(query, kv_layer, spans, 0.1, out, sliding_window=window, lse=lse)
    assert default_tile(dtype, head_dim).block_rows >= group
    if hopper_prefill.is_for(query, kv_layer):
        for of_tokens in (None, lse):
            hopper_prefill.attend(query, kv_layer, spans, 0.1, out, window, of_tokens)
        # Spans are cut before it is known which kernel reads them.
        assert default_tile(dtype, head_dim).block_rows == hopper_prefill.BLOCK_ROWS


def others(dtype: torch.dtype) -> None:
    kv_layer = torch.zeros(2, NUM_KV_HEADS, 2, 16, 128, dtype=dtype)
    pages, angles = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 64)
    qkv, weight = torch.zeros(1, 48, 128, dtype=dtype), torch.ones(128, dtype=dtype)
    rotate_and_write(qkv, kv_layer, TokenSlots(angles, angles, pages, pages))
    rotate_and_write(qkv, kv_layer, TokenSlots(angles, angles, pages, pages), HeadNorms(weight, weight, 1e-5))
    hidden, wide = torch.zeros(1, 4096, dtype=dtype), torch.ones(4096, dtype=dtype)
    rms_norm(hidden, wide, 1e-5)
    add_rms_norm(hidden, hidden.clone(), wide, 1e-5)
    silu_mul(hidden)
    if dtype is not torch.float32:
        for num_rows, num_columns in ((1, 4096), (2, 4096), (2, 6144)):
            rows, matrix = hidden.repeat(num_rows, 1), torch.zeros(2 * num_columns, 4096, dtype=dtype)
            residual = torch.zeros(num_rows, 2 * num_columns, dtype=dtype)
            skinny_linear(rows, matrix, matrix[:, 0].contiguous(), residual, norm=Norm(wide, 1e-5))
            skinny_linear(rows, matrix, norm=Norm(wide, 1e-5), is_gated=True)
            skinny_linear(hidden.repeat(64, 1), matrix, is_gated=True)
    page_copy.scatter_pages(kv_layer, pages, page_copy.gather_pages(kv_layer, pages))
    for encoding in kv_quantise.Encoding:
        numbers, scales = kv_quantise.quantise_pages(kv_layer, pages, encoding)
        kv_quantise.dequantise_pages(kv_layer, pages, numbers, scales)


def main() -> None:
    compiler = Compiler()

    def run(kernel: JITFunction, *args: Any, **named: Any) -> None:
        compiler.run(kernel, *args, **named)

    JITFunction.run = run
    cases: dict[str, Callable[[], None]] = {
        "bfloat16, llama-3-8b, pages of 64": lambda: attention(torch.bfloat16, 4, 128, 64, None),
        "bfloat16, head_dim 96, pages of 16, window": lambda: attention(torch.bfloat16, 7, 96, 16, 4096),
        "float16, head_dim 64, pages of 128, window": lambda: attention(torch.float16, 3, 64, 128, 100),
        "bfloat16": lambda: others(torch.bfloat16),
    }
    for compiler.case, compile_all in cases.items():
        compile_all()


if __name__ == "__main__":
    main()
