"""Transfers between two processes beside a peer and beside what the machine can do: see benchmarks/transfer.

python benchmarks/messenger.py [--quick] [--only SECTION] [--kib SIZE...] [--without-peer]
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # this folder would hide the package of this name
    runpy.run_module("benchmarks.transfer", run_name="__main__", alter_sys=True)
