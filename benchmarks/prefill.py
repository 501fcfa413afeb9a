"""Prefill with loads and stores, with reuse, in stages, and beside vLLM: see benchmarks/prefilling.

python benchmarks/prefill.py [--only overlap|reuse|pipeline|vllm] [--rounds N] [--tokens N,N,...]
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    runpy.run_module("benchmarks.prefilling", run_name="__main__", alter_sys=True)
