"""The engine on a GPU, its correctness and speed: see benchmarks/device.

python benchmarks/gpu.py [--only check|kernels|steps|serving]
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    runpy.run_module("benchmarks.device", run_name="__main__", alter_sys=True)
