"""`mooncake-serve` from its start to its end, as a person at a terminal meets it."""

import os
import signal
import socket
from pathlib import Path

import httpx
import pytest

from mooncake.security.keys import ClusterKey
from tests.cluster.forked import ForkedServer
from tests.cluster.harness import STOP_DEADLINE_S, Server, eventually
from tests.deadline import DEADLINE_S
from tests.ports import free_port
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import write_tiny_tokenizer

pytestmark = pytest.mark.cluster
SMALL = ["--kvcache-block-size=8", "--kvcache-pool-bytes=16MiB", "--kvcache-device-bytes=16MiB"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a tiny model that starts quickly."""
    directory = tmp_path_factory.mktemp("model")
    tiny_model("smollm2", directory)
    write_tiny_tokenizer(directory)
    return str(directory)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_ends_within_five_seconds_and_leaves_nothing(
    tiny: str, run_dir: Path, signum: signal.Signals
) -> None:
    before = shared_memory()
    with Server("--model", tiny, *SMALL, run_dir=run_dir) as server:
        pids = list(server.children().values())
        assert len(pids) == 5
        # A stream that is running when the signal comes must not hold up the end.
        with (
            httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client,
            client.stream(
                "POST",
                "/v1/completions",
                json={
                    "model": Path(tiny).name,
                    "prompt": [5, 6, 7],
                    "max_tokens": 400,
                    "ignore_eos": True,
                    "stream": True,
                },
            ) as response,
        ):
            next(response.iter_lines())
            assert server.stop(signum) < STOP_DEADLINE_S
    assert server.process.returncode == 0
    assert not [pid for pid in pids if is_running(pid)]
    assert list(run_dir.iterdir()) == []
    assert shared_memory() == before


def test_killed_supervisor_takes_its_processes_along(tiny: str, run_dir: Path) -> None:
    with Server("--model", tiny, *SMALL, run_dir=run_dir) as server:
        pids = list(server.children().values())
        server.process.kill()
        server.process.wait()
        eventually(lambda: not any(map(is_running, pids)), "children end when their supervisor is gone")
    # The next start removes what the killed supervisor could not.
    [abandoned] = run_dir.iterdir()
    with Server("--model", tiny, *SMALL, run_dir=run_dir):
        assert abandoned not in run_dir.iterdir()


def refused(*arguments: str, run_dir: Path, port: int | None = None) -> str:
    """The one line with which a start ends that cannot succeed."""
    server = ForkedServer(*arguments, run_dir=run_dir, port=port).start()
    server.process.wait(DEADLINE_S)
    server.__exit__()
    assert server.process.returncode not in (0, None)
    assert not [line for line in server.lines if "Traceback" in line], server.lines
    errors = [line for line in server.lines if line.startswith("error: ")]
    assert len(errors) == 1, server.lines
    assert list(run_dir.iterdir()) == []
    return errors[0]


def test_a_port_in_use_is_one_clear_line(tiny: str, run_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refused("--model", tiny, *SMALL, run_dir=run_dir, port=port)
    assert f"port {port} on 127.0.0.1 is in use" in message


def test_models_that_cannot_be_served_are_one_clear_line(tmp_path: Path, run_dir: Path) -> None:
    assert "/no/such/model" in refused("--model=/no/such/model", run_dir=run_dir)
    corrupt = tmp_path / "corrupt.gguf"
    corrupt.write_bytes(b"GGUF" + bytes(100))
    assert "corrupt.gguf" in refused(f"--model={corrupt}", run_dir=run_dir)
    broken = tmp_path / "broken"
    tiny_model("smollm2", broken)
    write_tiny_tokenizer(broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors" in refused(f"--model={broken}", run_dir=run_dir)
    unknown = tmp_path / "unknown"
    tiny_model("smollm2", unknown)
    write_tiny_tokenizer(unknown)
    config = unknown / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "MambaForCausalLM"))
    message = refused(f"--model={unknown}", run_dir=run_dir)
    assert "MambaForCausalLM" in message
    assert "LlamaForCausalLM" in message


def test_too_little_memory_is_one_clear_line(tiny: str, run_dir: Path) -> None:
    assert "device_bytes" in refused("--model", tiny, "--kvcache-device-bytes=1KiB", run_dir=run_dir)
    assert "pool" in refused("--model", tiny, "--kvcache-pool-bytes=1KiB", run_dir=run_dir)


def test_dummy_weights_serve(tiny: str, run_dir: Path) -> None:
    with ForkedServer("--model", tiny, "--load-format=dummy", *SMALL, run_dir=run_dir) as server:
        body = {"model": Path(tiny).name, "prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
        answer = (
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S)
            .raise_for_status()
            .json()
        )
        assert answer["usage"]["completion_tokens"] == 3


def test_separate_roles_over_tcp_make_a_cluster(tiny: str, run_dir: Path, tmp_path: Path) -> None:
    """Conductor, prefill and decode under supervisors of their own, no memory shared between instances."""

    ClusterKey.generate().save(tmp_path / "cluster.key")
    ClusterKey.generate().save(tmp_path / "other.key")
    conductor_endpoint = f"tcp://127.0.0.1:{free_port()}"
    without_key = [
        "--model",
        tiny,
        *SMALL,
        f"--conductor-endpoint={conductor_endpoint}",
        f"--conductor-reply-endpoint=tcp://127.0.0.1:{free_port()}",
        "--messenger-transport=tcp",
    ]
    common = [*without_key, f"--security-key-file={tmp_path / 'cluster.key'}"]
    prompt = list(range(3, 103))
    body = {"model": Path(tiny).name, "prompt": prompt, "max_tokens": 5, "ignore_eos": True, "temperature": 0}
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
        assert client.post("/v1/completions", json=body).status_code == 503
        other_key = [*without_key, f"--security-key-file={tmp_path / 'other.key'}"]
        with ForkedServer(
            "--role=decode", *other_key, run_dir=run_dir, until="waiting for the conductor"
        ) as other:
            other.wait_for_line(rf"{conductor_endpoint} has closed .* another cluster key")
            conductor.wait_for_line("refused .* do not have this cluster's key")
            assert "decode" in client.get("/ready").text
        with ForkedServer("--role=decode", *common, run_dir=run_dir):
            eventually(lambda: client.get("/ready").status_code == 200, "the cluster is ready")
            first = client.post("/v1/completions", json=body).raise_for_status().json()
            again = client.post("/v1/completions", json=body).raise_for_status().json()
            assert first["choices"][0]["text"] == again["choices"][0]["text"]
            assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
            message = refused(
                "--role=decode", "--instance=other", *common, "--dtype=bfloat16", run_dir=_new(run_dir)
            )
            assert "fingerprint differs" in message
            assert "other" in message


def _new(parent: Path) -> Path:
    directory = parent / "other"
    directory.mkdir()
    return directory
