"""What must be said before the first import of what it concerns.

Tests share the machine with one another: each process computes on one core, as those do that it starts. Where
there is no GPU, its kernels run in Triton's interpreter.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import random
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests import examples

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# What a script starts in the background ignores Ctrl-C, and so would processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# An example takes as long as a busy machine lets it. `make soak` names the second profile.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, max_examples=examples.REDUCED)
hypothesis.settings.register_profile("soak", deadline=None, print_blob=True, max_examples=examples.FULL)
hypothesis.settings.load_profile("tests")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed what a test and its fixtures draw by themselves: the same each time, by its own name."""
    random.seed(item.nodeid)


@pytest.fixture
def short_tmp_path() -> Iterator[Path]:
    """A directory whose sockets' paths are within what the system allows; `tmp_path` may be too long."""
    with tempfile.TemporaryDirectory(prefix="mooncake-test-") as path:
        yield Path(path)
