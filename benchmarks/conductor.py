"""What the Conductor's decisions cost, by instances and indexed blocks: see benchmarks/scheduling.

python benchmarks/conductor.py [--only index] [--full]
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # this folder would hide the package of this name
    runpy.run_module("benchmarks.scheduling", run_name="__main__", alter_sys=True)
