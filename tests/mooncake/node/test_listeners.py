"""Which ports a node takes, and what is said when somebody else has them."""

import socket
from pathlib import Path

import pytest

from mooncake.config.settings import Config, load_config
from mooncake.errors import ConfigError
from mooncake.node.listeners import ListenAddress, check_free, listen_addresses, parts_of
from mooncake.node.lives import Life
from mooncake.node.plan import plan_node
from mooncake.node.process_config import WorkerProcess
from mooncake.node.rundir import RunDirectory
from mooncake.security.keys import ClusterKey


def config(**flags: str) -> Config:
    return load_config(None, {}, {tuple(key.split("__")): value for key, value in flags.items()})


def ports(**flags: str) -> set[tuple[str, int]]:
    return {(place.key, place.port) for place in listen_addresses(config(**flags))}


def test_a_node_of_all_roles_takes_a_port_for_clients_alone() -> None:
    assert listen_addresses(config()) == [ListenAddress("http.port", "127.0.0.1", 8000)]
    assert listen_addresses(config(http__port="0")) == []


def test_ports_of_each_role() -> None:
    endpoints = {
        "conductor__endpoint": "tcp://10.0.0.1:7800",
        "conductor__reply_endpoint": "tcp://10.0.0.1:7801",
    }
    front = ("http.port", 8000)
    conductor, reply = ("conductor.endpoint", 7800), ("conductor.reply_endpoint", 7801)
    assert ports(role="conductor", **endpoints) == {front, conductor, reply}
    assert ports(role="front", **endpoints) == {front, reply}
    assert ports(role="decode", **endpoints) == set()
    free = {"conductor__endpoint": "ipc://x", "conductor__reply_endpoint": "tcp://10.0.0.1:*"}
    assert ports(role="conductor", **free) == {front}
    own = {
        "conductor__listen_endpoint": "tcp://*:7900",
        "conductor__reply_listen_endpoint": "tcp://[::]:7901",
    }
    listens = {("conductor.listen_endpoint", 7900), ("conductor.reply_listen_endpoint", 7901)}
    assert ports(role="conductor", **endpoints, **own) == {front, *listens}
    assert ports(role="prefill", messenger__port="7200", messenger__hosts="a,b") == {("messenger.port", 7200)}


def test_each_part_of_a_node_takes_a_port_more() -> None:
    flags = {
        "num_decode": "2",
        "messenger__port": "7200",
        "kvcache__listen": "0.0.0.0:7100",
        "kvcache__vllm_events": "tcp://*:5557",
        "worker__metrics_listen": "0.0.0.0:9100",
        "worker__modules_listen": "0.0.0.0:7300",
        "http__admin_listen": "127.0.0.1:8001",
    }
    firsts = {
        "messenger.port": 7200,
        "kvcache.listen": 7100,
        "kvcache.vllm_events": 5557,
        "worker.metrics_listen": 9100,
        "worker.modules_listen": 7300,
    }
    of_parts = {(key, first + index) for key, first in firsts.items() for index in range(3)}
    assert ports(**flags) == of_parts | {("http.port", 8000), ("http.admin_listen", 8001)}


def test_a_stage_listens_for_the_one_behind_it() -> None:
    flags = {
        "role": "prefill",
        "instance": "p",
        "pipeline__stages": "3",
        "pipeline__endpoints": "tcp://a:7301,tcp://b:7302",
        "worker__metrics_listen": "0.0.0.0:9100",
    }
    metrics = ("worker.metrics_listen", 9100)
    assert ports(**flags, pipeline__stage="0") == {("pipeline.endpoints", 7301), metrics}
    assert ports(**flags, pipeline__stage="1") == {("pipeline.endpoints", 7302)}
    assert ports(**flags, pipeline__stage="2") == set()
    own = {"pipeline__stage": "1", "pipeline__listen_endpoint": "tcp://0.0.0.0:7400"}
    assert ports(**flags, **own) == {("pipeline.listen_endpoint", 7400)}


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"num_prefill": "2", "num_decode": "3"},
        {"num_both": "2"},
        {"pipeline__stages": "3"},
        {"worker__tensor_parallel": "2", "num_decode": "2"},
        {"role": "prefill", "pipeline__stages": "2"},
        {"role": "conductor"},
        {"role": "front"},
        {"role": "decode", "worker__tensor_parallel": "2"},
    ],
)
def test_parts_are_those_that_the_node_starts(
    short_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_tmp_path))
    ClusterKey.generate().save(short_tmp_path / "key")
    flags = {"kvcache__pool_bytes": "4MiB", "security__key_file": str(short_tmp_path / "key"), **flags}
    with RunDirectory() as run_dir:
        specs = plan_node(config(**flags), run_dir)
    workers = [
        WorkerProcess.model_validate_json(spec.config(Life(1)))
        for spec in specs
        if spec.module == "workers.process.service"
    ]
    leads = [worker.stage.number == worker.rank.number == 0 for worker in workers]
    assert [part.leads for part in parts_of(config(**flags))] == leads


def test_what_nobody_can_listen_at_is_named_with_its_key() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            check_free([ListenAddress("http.port", "127.0.0.1", port)])
        option = "choose another with --http-port or MOONCAKE_HTTP_PORT"
        assert str(caught.value) == f"port {port} on 127.0.0.1 is in use; {option}"
        with pytest.raises(ConfigError, match=f"port {port} on 0.0.0.0 is in use"):
            check_free([ListenAddress("kvcache.listen", "0.0.0.0", port)])
    check_free([ListenAddress("http.port", "127.0.0.1", port)])
    with pytest.raises(ConfigError, match=r"messenger\.port: cannot listen on port 7000 of 192\.0\.2\.1"):
        check_free([ListenAddress("messenger.port", "192.0.2.1", 7000)])
    with pytest.raises(ConfigError, match=r"http\.port: cannot listen on no\.such\.host\.invalid"):
        check_free([ListenAddress("http.port", "no.such.host.invalid", 8000)])
    with pytest.raises(ConfigError, match=r"b: port 7000 on 127\.0\.0\.1 is a's too"):
        check_free([ListenAddress("a", "127.0.0.1", 7000), ListenAddress("b", "127.0.0.1", 7000)])
