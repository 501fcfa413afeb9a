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

from conductor.front.caches.cache_file import SCHEMA, CacheFile, StoredCache
from mooncake.errors import ConfigError, RequestError
from mooncake.node.state_file import StateFile
from tests.deadline import DEADLINE_S

MODEL = "m" * 32


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state/caches.db"


def cache(number: int, ttl_s: float = 600.0, **fields: Any) -> StoredCache:
    stored = StoredCache(
        id=f"cache-{number}",
        fingerprint=MODEL,
        name=f"name-{number}",
        owner="o" * 64,
        key_name="alice",
        token_ids=[number, 1 << 31, 0],
        chat_prefix=b"[[],[]]" if number % 2 else None,
        cache_salt="salt" if number % 3 else None,
        root_key=bytes(range(16)),
        created_at=1000.0 + number,
        expires_at=time.time() + ttl_s,
    )
    return stored._replace(**fields)


@contextmanager
def opened(path: Path) -> Iterator[CacheFile]:
    with closing(StateFile(path, (SCHEMA,))) as file:
        yield CacheFile(file)


def run(*changes: Coroutine[Any, Any, None]) -> None:
    async def all_of_them() -> None:
        await asyncio.gather(*changes)

    asyncio.run(all_of_them())


def test_caches_come_back_as_they_were_put(path: Path) -> None:
    one, two, three = cache(1), cache(2), cache(3)
    with opened(path) as file:
        assert file.load(MODEL) == []
        run(file.put(two), file.put(one), file.put(three))
        run(file.remove(three.id), file.extend(one.id, one.expires_at + 5))
    with opened(path) as file:
        assert file.load(MODEL) == [one._replace(expires_at=one.expires_at + 5), two]
        run(file.remove("none"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_those_of_another_model_wait_for_it_and_the_expired_are_gone(path: Path) -> None:
    with opened(path) as file:
        run(file.put(cache(1)), file.put(cache(2, fingerprint="other")), file.put(cache(3, ttl_s=-1.0)))
        assert [stored.id for stored in file.load(MODEL)] == ["cache-1"]
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM context_caches").fetchone() == (2,)
    with opened(path) as file:
        assert [stored.id for stored in file.load("other")] == ["cache-2"]


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
        found = [stored.id for stored in file.load(MODEL)]
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
        file.load(MODEL)
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
                file.extend("cache-1", time.time() + 10_000),
                file.remove("cache-1"),
            ):
                with pytest.raises(RequestError, match="cannot store context caches now") as caught:
                    run(change)
                assert (caught.value.status, caught.value.code) == (507, "context_cache_not_stored")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert file.num_failures == 3
        run(file.put(cache(3)))
    with opened(path) as file:
        stored = file.load(MODEL)
        assert [one.id for one in stored] == ["cache-1", "cache-3"]
        assert stored[0].expires_at < time.time() + 601
