"""The KVCache pool beside a peer and beside what the machine can do: see benchmarks/store.

python benchmarks/kvstore.py [--quick] [--full] [--only SECTION] [--directory DIR]
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # this folder would hide the package of this name
    runpy.run_module("benchmarks.store", run_name="__main__", alter_sys=True)
