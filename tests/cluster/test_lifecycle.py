"""`mooncake-serve` from its start to its end, as a person at a terminal meets it."""

import shutil
import signal
import socket
from pathlib import Path

import httpx
import pytest

from mooncake.security.keys import ClusterKey
from tests.cluster.forked import ForkedServer
from tests.cluster.harness import STOP_DEADLINE_S, Server, eventually
from tests.cluster.tiny_cluster import (
    SMALL,
    body,
    cached_tokens,
    complete,
    post,
    text_of,
    tiny_server,
)
from tests.deadline import DEADLINE_S
from tests.ports import free_port

pytestmark = pytest.mark.cluster


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def named_shared_memory(pid: int) -> list[str]:
    """The files in /dev/shm that this process has mapped, which stay until somebody removes them."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in maps if "/dev/shm/" in line and not line.endswith("(deleted)")]


@pytest.mark.parametrize(("kind", "signum"), [(ForkedServer, signal.SIGINT), (Server, signal.SIGTERM)])
def test_ends_within_five_seconds_and_leaves_nothing(
    tiny: Path, run_dir: Path, kind: type[Server], signum: signal.Signals
) -> None:
    with kind(f"--model={tiny}", *SMALL, run_dir=run_dir) as server:
        pids = list(server.children().values())
        assert sorted(server.children()) == ["both-0", "both-0/messenger", "conductor"]
        # KVCache and rings are in memory without a name, so that even a kill leaves nothing there.
        assert [named for pid in [server.process.pid, *pids] for named in named_shared_memory(pid)] == []
        # A connection without a request must not hold up the end.
        with httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client:
            assert client.get("/ready").status_code == 200
            assert server.stop(signum) < STOP_DEADLINE_S
    assert server.process.returncode == 0
    assert not [pid for pid in pids if is_running(pid)]
    assert files_of_processes(run_dir) == []


def test_killed_supervisor_takes_its_processes_along(tiny: Path, run_dir: Path) -> None:
    with tiny_server(tiny, run_dir) as server:
        pids = list(server.children().values())
        server.process.kill()
        server.process.wait()
        eventually(lambda: not any(map(is_running, pids)), "children end when their supervisor is gone")
    # The next start removes what the killed supervisor could not.
    [abandoned] = files_of_processes(run_dir)
    with tiny_server(tiny, run_dir):
        assert abandoned not in files_of_processes(run_dir)


def files_of_processes(run_dir: Path) -> list[Path]:
    """What is to go with them. The Conductor's state is to stay."""
    return [path for path in run_dir.iterdir() if path.name != "state"]


def refused(*arguments: str, run_dir: Path, port: int | None = None) -> str:
    """The one line with which a start ends that cannot succeed."""
    server = ForkedServer(*arguments, run_dir=run_dir, port=port).start()
    server.process.wait(DEADLINE_S)
    server.__exit__()
    assert server.process.returncode not in (0, None)
    assert not [line for line in server.lines if "Traceback" in line], server.lines
    errors = [line for line in server.lines if line.startswith("error: ")]
    assert len(errors) == 1, server.lines
    assert files_of_processes(run_dir) == []
    return errors[0]


def test_a_port_in_use_is_one_clear_line(tiny: Path, run_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refused(f"--model={tiny}", *SMALL, run_dir=run_dir, port=port)
    assert f"port {port} on 127.0.0.1 is in use" in message
    assert list(run_dir.iterdir()) == [], "no Conductor has begun"


def test_models_that_cannot_be_served_are_one_clear_line(tiny: Path, tmp_path: Path, run_dir: Path) -> None:
    assert "/no/such/model" in refused("--model=/no/such/model", run_dir=run_dir)
    corrupt = tmp_path / "corrupt.gguf"
    corrupt.write_bytes(b"GGUF" + bytes(100))
    assert "corrupt.gguf" in refused(f"--model={corrupt}", run_dir=run_dir)
    broken = shutil.copytree(tiny, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors" in refused(f"--model={broken}", run_dir=run_dir)
    unknown = shutil.copytree(tiny, tmp_path / "unknown")
    config = unknown / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "MambaForCausalLM"))
    message = refused(f"--model={unknown}", run_dir=run_dir)
    assert "MambaForCausalLM" in message
    assert "LlamaForCausalLM" in message
    assert list(run_dir.iterdir()) == [], "no Conductor has begun"


def test_too_little_memory_is_one_clear_line(tiny: Path, run_dir: Path) -> None:
    assert "device_bytes" in refused(f"--model={tiny}", "--kvcache-device-bytes=1KiB", run_dir=run_dir)
    assert "pool" in refused(f"--model={tiny}", "--kvcache-pool-bytes=1KiB", run_dir=run_dir)


def test_dummy_weights_serve(tiny: Path, run_dir: Path) -> None:
    with tiny_server(tiny, run_dir, "--load-format=dummy") as server:
        assert complete(server, prompt=[5, 6, 7], num_tokens=3)["usage"]["completion_tokens"] == 3


def test_separate_roles_over_tcp_make_a_cluster(tiny: Path, run_dir: Path, tmp_path: Path) -> None:
    """Conductor, prefill and decode under supervisors of their own, no memory shared between instances."""

    ClusterKey.generate().save(tmp_path / "cluster.key")
    ClusterKey.generate().save(tmp_path / "other.key")
    conductor_endpoint = f"tcp://127.0.0.1:{free_port()}"
    without_key = [
        f"--model={tiny}",
        *SMALL,
        f"--conductor-endpoint={conductor_endpoint}",
        f"--conductor-reply-endpoint=tcp://127.0.0.1:{free_port()}",
        "--messenger-transport=tcp",
    ]
    common = [*without_key, f"--security-key-file={tmp_path / 'cluster.key'}"]
    asked = body(list(range(3, 103)), num_tokens=5)
    with (
        ForkedServer(
            "--role=prefill", *common, run_dir=run_dir, until="waiting for the conductor"
        ) as prefill,
        ForkedServer("--role=conductor", *common, run_dir=run_dir) as conductor,
        httpx.Client(base_url=conductor.url, timeout=DEADLINE_S) as client,
    ):
        prefill.wait_for_line("ready prefill")
        assert client.get("/ready").status_code == 503
        assert "decode" in client.get("/ready").text
        assert post(conductor, asked).status_code == 503
        other_key = [*without_key, f"--security-key-file={tmp_path / 'other.key'}"]
        with ForkedServer(
            "--role=decode", *other_key, run_dir=run_dir, until="waiting for the conductor"
        ) as other:
            other.wait_for_line(rf"{conductor_endpoint} has closed .* another cluster key")
            conductor.wait_for_line("refused .* do not have this cluster's key")
            assert "decode" in client.get("/ready").text
        with ForkedServer("--role=decode", *common, run_dir=run_dir):
            eventually(lambda: client.get("/ready").status_code == 200, "the cluster is ready")
            first, again = (post(conductor, asked).raise_for_status().json() for _ in range(2))
            assert text_of(first) == text_of(again)
            assert (cached_tokens(first), cached_tokens(again)) == (0, 96)
            message = refused(
                "--role=decode", "--instance=other", *common, "--dtype=bfloat16", run_dir=_new(run_dir)
            )
            assert "fingerprint differs" in message
            assert "other" in message


def _new(parent: Path) -> Path:
    directory = parent / "other"
    directory.mkdir()
    return directory
