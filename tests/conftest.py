"""Settings of all tests, made before the first import of the libraries that read them.

Tests share the machine with one another: each process computes on one core, and so do the processes that it
starts. Where there is no GPU, the GPU's kernels run in Triton's interpreter.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import functools
import random
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import hypothesis
import pytest
import torch

from tests import examples

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Each new client would read all of the system's certificates again, which takes 20 ms.
pytest.MonkeyPatch().setattr(
    "httpx._transports.default.create_ssl_context", functools.cache(httpx.create_ssl_context)
)

# What a script starts in the background ignores Ctrl-C, and so would processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# An example takes as long as a busy machine lets it. `make soak` names the second profile.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, max_examples=examples.REDUCED)
hypothesis.settings.register_profile("soak", deadline=None, print_blob=True, max_examples=examples.FULL)
hypothesis.settings.load_profile("tests")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed the random numbers of a test and its fixtures by the test's name, so that they are the same each
    time."""
    random.seed(item.nodeid)


@pytest.fixture
def short_tmp_path() -> Iterator[Path]:
    """A temporary directory with a path short enough for sockets; that of `tmp_path` may be too long."""
    with tempfile.TemporaryDirectory(prefix="mooncake-test-") as path:
        yield Path(path)
