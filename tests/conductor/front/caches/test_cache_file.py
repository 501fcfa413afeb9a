"""The file of context caches: what is in it after a kill, and what of it is refused."""

import asyncio
import multiprocessing
import os
import re
import resource
import signal
import sqlite3
import stat
import time
from collections.abc import Coroutine, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from conductor.front.caches.cache_file import SCHEMA, CacheFile
from conductor.front.caches.cache_store import StoredCache
from mooncake.errors import ConfigError, NotStoredError
from mooncake.node.state_file import StateFile
from tests.conductor.front.caches.stored import MODEL, cache
from tests.deadline import DEADLINE_S


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state/caches.db"


@contextmanager
def opened(path: Path) -> Iterator[CacheFile]:
    with closing(StateFile(path, (SCHEMA,))) as file:
        yield CacheFile(file)


def load(file: CacheFile, fingerprint: str = MODEL) -> list[StoredCache]:
    return asyncio.run(file.load(fingerprint))


def run(*changes: Coroutine[Any, Any, None]) -> None:
    async def all_of_them() -> None:
        await asyncio.gather(*changes)

    asyncio.run(all_of_them())


def test_caches_come_back_as_they_were_put(path: Path) -> None:
    one, two, three = cache(1), cache(2), cache(3)
    with opened(path) as file:
        assert load(file) == []
        run(file.put(two), file.put(one), file.put(three))
        run(file.remove(three.id), file.extend(one._replace(expires_at=one.expires_at + 5)))
    with opened(path) as file:
        assert load(file) == [one._replace(expires_at=one.expires_at + 5), two]
        run(file.remove("none"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_those_of_another_model_wait_for_it_and_the_expired_are_gone(path: Path) -> None:
    with opened(path) as file:
        run(file.put(cache(1)), file.put(cache(2, fingerprint="other")), file.put(cache(3, ttl_s=-1.0)))
        assert [stored.id for stored in load(file)] == ["cache-1"]
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM context_caches").fetchone() == (2,)
    with opened(path) as file:
        assert [stored.id for stored in load(file, "other")] == ["cache-2"]


def _put_for_ever(path: Path, told: Any) -> None:
    async def put() -> None:
        file = CacheFile(StateFile(path, (SCHEMA,)))
        number = 0
        while True:
            number += 1
            await file.put(cache(number, token_ids=list(range(5000))))
            told.send(number)

    asyncio.run(put())


def test_what_was_put_outlives_a_kill(path: Path) -> None:
    """And the lock does not."""
    heard, told = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_put_for_ever, args=(path, told))
    process.start()
    told.close()
    try:
        assert heard.poll(DEADLINE_S)
        heard.recv()
        with pytest.raises(ConfigError, match="used by another mooncake-serve"):
            StateFile(path, (SCHEMA,))
    finally:
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    numbers = [1]
    while heard.poll():
        try:
            numbers.append(heard.recv())
        except EOFError:
            break
    with opened(path) as file:
        found = [stored.id for stored in load(file)]
    assert found[: max(numbers)] == [f"cache-{number}" for number in range(1, max(numbers) + 1)]
    assert len(found) <= max(numbers) + 1


def _break_at(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(os.urandom(2000))


@pytest.mark.parametrize("damage", ["text", "header", "pages", "content", "foreign", "newer"])
def test_a_file_that_is_none_of_ours_is_refused(path: Path, damage: str) -> None:
    with opened(path) as file:
        run(*(file.put(cache(number, token_ids=list(range(3000)))) for number in range(8)))
    if damage == "text":
        path.write_text("no database at all" * 100)
    elif damage in ("header", "pages", "content"):
        _break_at(path, {"header": 0, "pages": 4096 + 8, "content": path.stat().st_size - 2500}[damage])
    else:
        with closing(sqlite3.connect(path)) as database:
            database.execute(f"PRAGMA {'application_id' if damage == 'foreign' else 'user_version'} = 99")
    whole = path.read_bytes()
    with pytest.raises(ConfigError) as caught, opened(path) as file:
        load(file)
    assert re.match(rf"conductor.state_file {path} is damaged, .*; move it away", str(caught.value))
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == whole, "somebody may want to look at it"


def test_a_place_that_cannot_be_written_to_is_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file/caches.db", tmp_path, Path("/proc/none/caches.db")):
        with pytest.raises(ConfigError, match=f"conductor.state_file {place} cannot be"):
            StateFile(place, (SCHEMA,))


def test_a_full_disk_costs_the_change_alone(path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(path) as file:
        run(file.put(cache(1)))
        size = max(each.stat().st_size for each in path.parent.iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            for change in (
                file.put(cache(2, token_ids=list(range(100_000)))),
                file.extend(cache(1, ttl_s=10_000)),
                file.remove("cache-1"),
            ):
                with pytest.raises(NotStoredError):
                    run(change)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        run(file.put(cache(3)))
    with opened(path) as file:
        stored = load(file)
        assert [one.id for one in stored] == ["cache-1", "cache-3"]
        assert stored[0].expires_at < time.time() + 601
