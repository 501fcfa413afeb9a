"""The kernels compile for Hopper, without a GPU, in bfloat16, which the interpreter cannot compute."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.deadline import DEADLINE_S

SHARED_BYTES_OF_AN_SM = 227 * 1024


def test_every_kernel_compiles_for_hopper_without_spilling(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.cuda.compiling"],
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    assert {report["kernel"] for report in reports} == {
        "_attend_part",
        "_merge_parts",
        "_attend_tile",
        "_attend_tile_hopper",
        "_rotate_and_write",
        "_rms_norm",
        "_silu_mul",
        "_skinny_linear",
        "_copy_pages",
        "_quantise",
        "_dequantise",
    }
    for report in reports:
        assert report["stack_bytes"] == 0, report
        assert report["shared_bytes"] <= SHARED_BYTES_OF_AN_SM, report
        if report["kernel"] in ("_attend_tile", "_attend_tile_hopper"):
            assert "wgmma" in report["products"], report
        if report["kernel"] == "_attend_part":
            assert "mma.sync" in report["products"], report
