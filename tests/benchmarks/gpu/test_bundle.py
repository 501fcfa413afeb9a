"""Which packages a machine without an index lacks, from metadata of packages that are installed here."""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from benchmarks.gpu.bundle import missing

Add = Callable[..., None]


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Add:
    """Installs a package here: its name, version and what it needs."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(name: str, version: str, *needs: str) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {need}" for need in needs)]
        (folder / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")

    return install


def test_what_a_missing_package_needs_is_found_and_what_is_there_stays(add: Add) -> None:
    add("mcm-front", "1.5", "mcm-core==2.1", "mcm-types>=4", "mcm-there>=1")
    add("mcm-core", "2.1", "mcm-types>=4.16")
    add("mcm-types", "4.16")
    add("mcm-there", "3.0", "mcm-unneeded")
    installed = {"mcm-types": "4.9", "mcm-there": "1.2+cu130"}
    needed = ["MCM_Front>=1", "mcm-there"]
    assert missing(needed, installed, "3.12") == {
        "mcm-front": "1.5",
        "mcm-core": "2.1",
        "mcm-types": "4.16",
    }
    assert missing(needed, {**installed, "mcm-front": "1.0"}, "3.12") == {}


def test_markers_are_of_the_machine_and_extras_those_that_are_asked_for(add: Add) -> None:
    add(
        "mcm-front",
        "1",
        "mcm-old; python_version < '3.12'",
        "mcm-fast; extra == 'fast'",
        "mcm-dev; extra == 'dev'",
    )
    add("mcm-old", "2")
    add("mcm-fast", "3")
    assert missing(["mcm-front[fast]"], {}, "3.12") == {"mcm-front": "1", "mcm-fast": "3"}
    assert missing(["mcm-front"], {}, "3.11") == {"mcm-front": "1", "mcm-old": "2"}
    with pytest.raises(PackageNotFoundError, match="mcm-dev"):
        missing(["mcm-front[dev]"], {}, "3.12")
