"""The engine on a GPU: is it right, how fast is it beside what the device can do, and does it serve.

    python -m benchmarks.gpu [--only check|kernels|steps|serving]

- check: every kernel against its torch reference in float32, float16 and bfloat16; tiny models against torch.
- kernels: GB/s and TFLOP/s at the shapes of Llama-3-8B, beside a copy and a product of matrices of this run.
- steps: decode steps and prefill passes of a Llama-3-8B with random weights.
- serving: that model, with one prefill and one decode instance on the one GPU, through HTTP.

The first three need torch, numpy and triton only; the last says so if something is missing. Without a GPU it
says so and exits with 0. Exits with 1 if a result is wrong or a bar is missed.

Owns: the order. Does not know: what is measured how.
"""

import argparse
import sys

import torch

from kernels.cuda import why_unavailable

_SECTIONS = ("check", "kernels", "steps", "serving")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="see the module's docstring"
    )
    parser.add_argument("--only", choices=_SECTIONS)
    only = parser.parse_args().only
    sections = (only,) if only else _SECTIONS
    if not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is False; nothing to check or measure")
        return 0
    if why_unavailable():
        print(why_unavailable())
        return 1
    # Only now: they import Triton.
    from benchmarks.gpu import checks, layers, serving, steps
    from benchmarks.gpu.ceilings import Ceilings

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if "check" in sections and not checks.check():
        return 1
    is_met = True
    if {"kernels", "steps"} & set(sections):
        ceilings = Ceilings.measure()
        if "kernels" in sections:
            layers.measure(ceilings)
        if "steps" in sections:
            steps.measure(ceilings)
        is_met = ceilings.is_met
    if "serving" in sections:
        torch.cuda.empty_cache()  # for the processes that serve
        is_met &= serving.serve()
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
