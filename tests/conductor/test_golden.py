"""Replays transcripts of the Conductor's decisions: `golden/*.txt`, in the form of `transcript`.

After an intended change `python -m tests.conductor.test_golden` writes what happens now: read the difference.
"""

from pathlib import Path

import pytest

from tests.conductor.transcript import replay

FILES = sorted((Path(__file__).parent / "golden").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_the_conductor_decides_as_written(path: Path) -> None:
    assert replay(path) == path.read_text()


if __name__ == "__main__":
    for file in FILES:
        file.write_text(replay(file))
