"""Where there is no GPU, its kernels run in Triton's interpreter, which must be said before their import."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def short_tmp_path() -> Iterator[Path]:
    """A directory whose sockets' paths are within what the system allows; `tmp_path` may be too long."""
    with tempfile.TemporaryDirectory(prefix="mooncake-test-") as path:
        yield Path(path)
