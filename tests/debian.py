"""What becomes of a test whose program of Debian's (`benchmarks.debian`) cannot be had."""

import os
from pathlib import Path

import pytest

from benchmarks.debian import CannotFetchError, fetch


def fetched(package: str, program: str) -> Path:
    """The path of `program` (inside the package, from / on). Skips the test where it cannot be had; in CI it
    fails, so that a test does not quietly stop running there."""
    try:
        return fetch(package) / program
    except CannotFetchError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI needs {package}: {error}")
        pytest.skip(f"no {package}: {error}")
