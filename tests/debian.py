"""Programs of Debian (`benchmarks.debian`) for tests, and the end of a test whose program cannot be had."""

import os
from pathlib import Path

import pytest

from benchmarks.debian import CannotFetchError, fetch


def fetched(package: str, program: str) -> Path:
    """Return the path of `program`, which is its path inside the Debian package, without the leading slash.

    Skips the test if the program cannot be had. In CI the test fails, so that it is not silently skipped.
    """
    try:
        return fetch(package) / program
    except CannotFetchError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI needs {package}: {error}")
        pytest.skip(f"no {package}: {error}")
