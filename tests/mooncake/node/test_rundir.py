import os
from pathlib import Path

import pytest

from mooncake.errors import ConfigError
from mooncake.node.rundir import RunDirectory


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_is_private_and_removed_with_everything_in_it(base: Path) -> None:
    with RunDirectory() as run_dir:
        assert run_dir.path.parent == base
        assert run_dir.path.stat().st_mode & 0o777 == 0o700
        Path(run_dir.socket("a")).touch()
    assert list(base.iterdir()) == []


def test_an_abandoned_directory_is_removed_and_a_live_one_kept(base: Path) -> None:
    abandoned = RunDirectory()
    os.close(abandoned._lock)  # its supervisor was killed
    with RunDirectory() as live, RunDirectory() as another:
        assert not abandoned.path.exists()
        assert live.path.exists()
        assert another.path.exists()


def test_another_programs_directory_is_left_alone(base: Path) -> None:
    foreign = base / "mooncake-serve-notes"
    foreign.mkdir()
    with RunDirectory():
        assert foreign.exists()


def test_places_that_cannot_be_used_are_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunDirectory() as run_dir, pytest.raises(ConfigError, match="longer than 107 bytes"):
        run_dir.socket("x" * 100)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/no/such/directory")
    with pytest.raises(ConfigError, match="/no/such/directory"):
        RunDirectory()
