"""Forked processes and the end of the one that has started them."""

import subprocess
import sys
from pathlib import Path

from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parent.parent
LEAVES_ONE = """
import time
from tests.forked import Forked
left = Forked(time.sleep, 100.0, stdin=0, stdout=1, stderr=2, environ={})
print(left.pid)
"""


def test_what_a_process_has_left_is_ended_with_it() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES_ONE],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        timeout=DEADLINE_S,
        check=True,
    )
    assert not Path(f"/proc/{int(ended.stdout)}").exists()
