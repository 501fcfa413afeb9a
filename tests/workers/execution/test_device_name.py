"""The names by which devices are told apart."""

import platform
from pathlib import Path

import pytest

from workers.execution.device_name import processor_name


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor\t: 0\nmodel\t\t: 17\nmodel name\t: AMD EPYC 9V74: 80-Core\n", "AMD EPYC 9V74: 80-Core"),
        ("processor\t: 0\nBogoMIPS\t: 243.75\n", platform.machine()),
        (None, platform.machine()),
    ],
)
def test_a_processor_has_its_model_s_name_or_its_architecture(
    tmp_path: Path, cpuinfo: str | None, name: str
) -> None:
    path = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        path.write_text(cpuinfo)
    assert processor_name(path) == name
