"""`mooncake-kv` against running pools."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from kvstore.client import cli
from kvstore.client.client import KVCachePool
from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import PoolStats
from mooncake.node.rundir import Run, RunDirectory
from mooncake.security.keys import ClusterKey
from tests.forked import Forked, preload
from tests.kvstore.nodes import DEADLINE_S, LAYOUT, ROOT
from tests.kvstore.pools import Pool, Pools, block_of, keys_of

pytestmark = pytest.mark.cluster

preload(__name__)
COMMAND = [sys.executable, "-m", "kvstore.client.cli"]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool, at the place where a mooncake-serve would have it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        run_dir = RunDirectory()
    with run_dir, Pools(run_dir.path) as pools:
        run_dir.describe(Run("all", f"ipc://{run_dir.socket('conductor')}", 8000))
        yield pools.start("worker-0")


@pytest.fixture
def keys(pool: Pool) -> list[BlockKey]:
    """All that is in the pool."""
    with pool.client() as client:
        client.clear()
        keys = keys_of(3)
        client.put(keys, [block_of(key) for key in keys])
        return keys


def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    with open(os.devnull) as stdin, TemporaryFile("w+") as stdout, TemporaryFile("w+") as stderr:
        process = Forked(
            call,
            arguments,
            stdin=stdin.fileno(),
            stdout=stdout.fileno(),
            stderr=stderr.fileno(),
            environ={**os.environ, **(environment or {})},
        )
        with closing(process):
            code = process.wait(3 * DEADLINE_S)
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(arguments, code, stdout.read(), stderr.read())


def call(arguments: Sequence[str]) -> None:
    sys.exit(cli.run(arguments))


def run_on_terminal(*arguments: str, typed: str = "", num_columns: int = 140) -> tuple[int, str]:
    """Exit code, and what a person would see."""
    terminal, end = pty.openpty()
    environ = {**os.environ, "COLUMNS": str(num_columns)}
    with closing(Forked(call, arguments, stdin=end, stdout=end, stderr=end, environ=environ)) as process:
        os.close(end)
        os.write(terminal, typed.encode())
        seen = b""
        while select.select([terminal], [], [], 3 * DEADLINE_S)[0]:
            try:
                seen += os.read(terminal, 1 << 16)
            except OSError:  # the last writer has closed it
                break
        os.close(terminal)
        return process.wait(DEADLINE_S), seen.decode()


def json_lines(result: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("door", ["unix", "tcp"])
def test_stats_of_a_pool_given_by_address(pool: Pool, keys: list[BlockKey], door: str) -> None:
    address = getattr(pool, door)
    there = ["--pool", address, "--key-file", str(pool.key_file)]
    (stats,) = json_lines(run("stats", *there, "--json"))
    assert (stats["instance"], stats["num_sealed"], stats["integrity"]) == ("worker-0", len(keys), None)
    lines = run("stats", *there).stdout.splitlines()
    assert [line.split("\t")[:4] for line in lines] == [
        ["instance", "tier", "blocks", "of"],
        ["worker-0", "dram", "3", "16"],
    ]


def test_stats_have_every_page_looked_at_only_on_demand(
    pool: Pool, keys: list[BlockKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    stats, looks = KVCachePool.stats, []

    def noted(client: KVCachePool, check_integrity: bool = False) -> dict[str, PoolStats]:
        looks.append(check_integrity)
        return stats(client, check_integrity)

    monkeypatch.setattr(KVCachePool, "stats", noted)
    assert cli.run(["stats", "--pool", pool.unix]) == 0
    assert cli.run(["stats", "--pool", pool.unix, "--check"]) == 0
    assert looks == [False, True]


def test_pools_of_this_users_runs_are_found(pool: Pool, keys: list[BlockKey], tmp_path: Path) -> None:
    base = str(Path(pool.socket_path).parents[1])
    (stats,) = json_lines(run("stats", "--json", environment={"XDG_RUNTIME_DIR": base}))
    assert stats["instance"] == "worker-0"
    nothing = run("stats", environment={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert nothing.returncode == 1
    assert nothing.stderr == "error: no mooncake-serve of this user runs here; name a pool with --pool\n"


@pytest.fixture
def second_cluster(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDirectory]:
    """Beside the pool's. Its own pool answers nobody."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(Path(pool.socket_path).parents[1]))
    with RunDirectory() as run_dir:
        run_dir.describe(Run("all", f"ipc://{run_dir.socket('conductor')}", 8001))
        Path(run_dir.socket("worker-0")).touch()
        yield run_dir


def test_one_of_several_clusters_has_to_be_named(
    pool: Pool, keys: list[BlockKey], second_cluster: RunDirectory
) -> None:
    run_dir = str(Path(pool.socket_path).parent)
    for command in (["stats"], ["ls"], ["verify"], ["drop", "--all", "--yes"], ["drop", keys[0].hex()]):
        refused = run(*command)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.startswith("error: 2 clusters of this user run here; say which with --cluster:")
        assert f"8000 ({run_dir})" in refused.stderr
    assert len(json_lines(run("ls", "--cluster", "8000", "--json"))) == len(keys)
    assert len(json_lines(run("ls", "--cluster", run_dir, "--json"))) == len(keys)
    assert run("ls", "--cluster", "8002").returncode == 2
    assert run("ls", "--cluster", "8001").returncode == 1  # its pool answers nobody


def test_all_blocks_of_two_clusters_are_never_dropped(
    pool: Pool, keys: list[BlockKey], second_cluster: RunDirectory
) -> None:
    other = f"unix:{second_cluster.socket('worker-0')}"
    for pools in (["--pool", pool.unix, "--pool", other], ["--pool", pool.unix, "--pool", pool.tcp]):
        refused = run("drop", "--all", "--yes", *pools, "--key-file", str(pool.key_file))
        assert refused.returncode == 2
        assert "not known to be of one cluster" in refused.stderr
    assert len(json_lines(run("ls", "--cluster", "8000", "--json"))) == len(keys)
    assert json_lines(run("drop", "--all", "--yes", "--cluster", "8000", "--json"))[0]["num_dropped"] == len(
        keys
    )


def test_dead_pool_is_named_and_the_others_are_shown(
    pool: Pool, keys: list[BlockKey], tmp_path: Path
) -> None:
    dead = f"unix:{tmp_path}/dead.sock"
    result = run("stats", "--pool", dead, "--pool", pool.unix)
    assert result.returncode == 1
    assert "worker-0\tdram" in result.stdout
    assert result.stderr.startswith(f"error: no pool answers: nobody listens at {dead}")
    alone = run("stats", "--pool", dead)
    assert (alone.returncode, alone.stdout) == (1, "")
    assert len(alone.stderr.splitlines()) == 1


def test_ls_lists_every_block(pool: Pool, keys: list[BlockKey]) -> None:
    blocks = json_lines(run("ls", "--pool", pool.unix, "--json"))
    assert {block["key"] for block in blocks} == {key.hex() for key in keys}
    assert {block["tier"] for block in blocks} == {"dram"}
    lines = run("ls", "--pool", pool.unix).stdout.splitlines()
    assert lines[0] == "key\tinstance\ttier\tuses\tusers"
    assert len(lines) == 1 + len(keys)


def test_terminal_gets_a_table(pool: Pool, keys: list[BlockKey]) -> None:
    code, seen = run_on_terminal("ls", "--pool", pool.unix)
    assert code == 0
    assert "━━━" in seen
    assert all(key.hex() in seen for key in keys)
    code, seen = run_on_terminal("stats", "--pool", pool.unix)
    assert code == 0
    assert "healthy" in seen


@pytest.mark.parametrize("command", ["ls", "stats", "verify"])
def test_tables_fit_into_80_columns(pool: Pool, keys: list[BlockKey], command: str) -> None:
    code, seen = run_on_terminal(command, "--pool", pool.unix, num_columns=80)
    assert code == 0
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in seen.splitlines()]
    table = [line for line in lines if not line.endswith(pool.unix)]
    assert table
    assert max(map(len, table)) <= 80
    assert [line for line in table if "instance" in line], "headings are whole"
    if command == "stats":
        assert f"worker-0 is {pool.unix}" in lines
    if command == "ls":
        assert {key.hex() for key in keys} <= {word for line in lines for word in line.split()}


def test_get_writes_a_block_or_some_of_its_layers(pool: Pool, keys: list[BlockKey], tmp_path: Path) -> None:
    out = tmp_path / "block"
    key = keys[1]
    there = ["--pool", pool.tcp, "--key-file", str(pool.key_file)]
    assert run("get", key.hex(), "--out", str(out), *there).returncode == 0
    assert out.read_bytes() == block_of(key)
    (facts,) = json_lines(
        run("get", key.hex(), "--out", str(out), "--layers", "1:3", "--pool", pool.unix, "--json")
    )
    assert facts == {"key": key.hex(), "num_bytes": 2 * LAYOUT.layer_bytes, "file": str(out)}
    assert out.read_bytes() == block_of(key)[LAYOUT.layer_bytes : 3 * LAYOUT.layer_bytes]


def test_pool_on_another_host_wants_the_right_key(pool: Pool, tmp_path: Path) -> None:
    missing = run("stats", "--pool", pool.tcp)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert f"error: {pool.tcp} listens only to those who know its cluster's key" in missing.stderr
    assert "--key-file" in missing.stderr
    ClusterKey.generate().save(tmp_path / "wrong.key")
    wrong = run("stats", "--pool", pool.tcp, "--key-file", str(tmp_path / "wrong.key"))
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith(f"error: the pool at {pool.tcp} has another cluster key")


def test_get_of_a_missing_block_writes_nothing(pool: Pool, keys: list[BlockKey], tmp_path: Path) -> None:
    out = tmp_path / "block"
    result = run("get", "00" * 16, "--out", str(out), "--pool", pool.unix)
    assert (result.returncode, result.stderr) == (1, f"error: no pool has an intact block {'00' * 16}\n")
    assert not out.exists()
    unwritable = run("get", keys[0].hex(), "--out", str(tmp_path / "no" / "where"), "--pool", pool.unix)
    assert unwritable.returncode == 1
    assert "No such file" in unwritable.stderr


def test_verify_says_what_was_damaged(pool: Pool, keys: list[BlockKey]) -> None:
    assert json_lines(run("verify", "--pool", pool.unix, "--json")) == [
        {"instance": "worker-0", "num_intact": 3, "damaged": [], "num_unread": 0}
    ]
    pool.damage(keys[2], layer=0)
    result = run("verify", "--pool", pool.unix)
    assert result.returncode == 1
    assert f"worker-0\t2\t{keys[2].hex()}" in result.stdout
    assert run("verify", "--pool", pool.unix).returncode == 0  # it has been dropped
    code, seen = run_on_terminal("verify", "--pool", pool.unix)
    assert code == 0
    assert "worker-0" in seen


def test_drop_forgets_blocks(pool: Pool, keys: list[BlockKey]) -> None:
    dropped = json_lines(run("drop", keys[0].hex(), "--pool", pool.unix, "--json"))
    assert dropped == [{"instance": "worker-0", "num_dropped": 1}]
    again = run("drop", keys[0].hex(), "--pool", pool.unix)
    assert (again.returncode, again.stderr) == (1, "error: this block is in no pool\n")
    unasked = run("drop", "--all", "--pool", pool.unix)
    assert unasked.returncode == 2
    assert "stdin is no terminal to answer on: add --yes" in unasked.stderr
    assert json_lines(run("drop", "--all", "--yes", "--pool", pool.unix, "--json"))[0]["num_dropped"] == 2


def test_drop_asks_on_a_terminal(pool: Pool, keys: list[BlockKey]) -> None:
    code, seen = run_on_terminal("drop", "--all", "--pool", pool.unix, typed="n\n")
    assert code == 1
    assert "Drop every block of these pools? [y/N]" in seen
    assert len(json_lines(run("ls", "--pool", pool.unix, "--json"))) == 3
    code, seen = run_on_terminal("drop", keys[0].hex(), "--pool", pool.unix, typed="y\n")
    assert (code, "Drop 1 block?" in seen) == (0, True)
    code, seen = run_on_terminal("drop", "--all", "--yes", "--pool", pool.unix)
    assert (code, "[y/N]" in seen) == (0, False)
    assert json_lines(run("ls", "--pool", pool.unix, "--json")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["get", "xyz", "--out", "f"], "a key has 32 hexadecimal digits, not 'xyz'"),
        (["get", "00" * 16], "--out"),
        (["get", "00" * 16, "--out", "f", "--layers", "all"], "FIRST:END, such as 0:4, not 'all'"),
        (["get", "00" * 16, "--out", "f", "--layers", "2:9"], "the blocks have the layers 0:4"),
        (["drop"], "one of the arguments"),
        (["drop", "--all", "00" * 16], "not allowed with"),
        (
            ["stats", "--pool", "somewhere"],
            "a pool's address is unix:/path/of.sock, tcp://host:port or tcp://[IPv6]:port",
        ),
        ([], "COMMAND"),
    ],
)
def test_wrong_use_exits_with_2_and_says_what_is_wrong(
    pool: Pool, arguments: list[str], message: str
) -> None:
    where = ["--pool", pool.unix] if arguments and "--pool" not in arguments else []
    result = run(*arguments, *where)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr


def test_reader_that_has_seen_enough_is_no_error(pool: Pool) -> None:
    with pool.client() as client:
        client.clear()
        (key,) = keys_of(1)
        client.put([key], [block_of(key)])
    process = subprocess.Popen(
        [*COMMAND, "ls", "--pool", pool.unix],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(3 * DEADLINE_S) == 0
    assert process.stderr.read() == ""
    process.stderr.close()


def test_interrupt_ends_quietly(pool: Pool) -> None:
    assert pool.process is not None
    pool.process.send_signal(signal.SIGSTOP)
    try:
        process = subprocess.Popen(
            [*COMMAND, "stats", "--pool", pool.unix],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_until_connected(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=DEADLINE_S) == ("", "")
        assert process.returncode == 130
    finally:
        pool.process.send_signal(signal.SIGCONT)


def wait_until_connected(pid: int) -> None:
    """Until the process has a socket open and waits for what comes from it."""
    deadline = time.monotonic() + DEADLINE_S
    while not has_socket(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_socket(pid: int) -> bool:
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(path).startswith("socket:"):
                return True
    return False


def test_help_describes_every_command() -> None:
    result = run("--help")
    assert result.returncode == 0
    for command in ("stats", "ls", "get", "verify", "drop"):
        assert command in result.stdout
