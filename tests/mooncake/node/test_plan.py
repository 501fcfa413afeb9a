"""What a node is made of: processes and mapped memory, addresses that do not clash."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mooncake.config.conductor_section import ConductorConfig
from mooncake.config.sections import (
    HttpConfig,
    KVCacheConfig,
    MessengerConfig,
    PipelineConfig,
    SecurityConfig,
    WorkerConfig,
)
from mooncake.config.settings import Config, load_config
from mooncake.errors import ConfigError
from mooncake.node.lives import Life
from mooncake.node.mapping import HUGE_PAGE_BYTES, MappedFile
from mooncake.node.plan import plan_node
from mooncake.node.process_config import ConductorProcess, FrontProcess, WorkerProcess
from mooncake.node.rundir import Run, RunDirectory, running
from mooncake.security.keys import ClusterKey

SIZE = 4 << 20


@pytest.fixture
def run_directory(short_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_tmp_path))
    return RunDirectory()


def test_instances_of_a_node_listen_at_different_ports(run_directory: RunDirectory, tmp_path: Path) -> None:
    ClusterKey.generate().save(tmp_path / "key")
    kvcache = KVCacheConfig(
        pool_bytes=SIZE, listen="0.0.0.0:7100", vllm_events="tcp://*:5557", vllm_replay="tcp://*:6557"
    )
    config = Config(
        kvcache=kvcache,
        num_decode=2,
        messenger=MessengerConfig(port=7200),
        worker=WorkerConfig(metrics_listen="0.0.0.0:9100"),
        security=SecurityConfig(key_file=tmp_path / "key"),
    )
    specs = plan_node(config, run_directory)
    messengers = [json.loads(spec.config(Life(1))) for spec in specs if spec.name.endswith("/messenger")]
    told = [
        (m["kvcache"]["listen"], m["kvcache"]["vllm_events"], m["kvcache"]["vllm_replay"]) for m in messengers
    ]
    assert told == [
        (f"0.0.0.0:{7100 + index}", f"tcp://*:{5557 + index}", f"tcp://*:{6557 + index}")
        for index in range(3)
    ]
    assert [m["settings"]["port"] for m in messengers] == [7200, 7201, 7202]
    workers = [json.loads(spec.config(Life(1))) for spec in specs if spec.module == "workers.process.service"]
    told_workers = [w["config"]["worker"]["metrics_listen"] for w in workers]
    assert told_workers == ["0.0.0.0:9100", "0.0.0.0:9101", "0.0.0.0:9102"]
    assert len({endpoint for m in messengers for endpoint in m["event_endpoints"]}) == 6


def names_of(config: Config, run_directory: RunDirectory) -> list[str]:
    """The workers of a node."""
    specs = plan_node(config, run_directory)
    return [spec.name for spec in specs if spec.module == "workers.process.service"]


def test_instances_of_both_roles_stand_alone_or_beside_others(run_directory: RunDirectory) -> None:
    kvcache = KVCacheConfig(pool_bytes=SIZE)
    assert names_of(Config(kvcache=kvcache), run_directory) == ["both-0"]
    assert names_of(Config(kvcache=kvcache, num_both=2), run_directory) == ["both-0", "both-1"]
    beside = Config(kvcache=kvcache, num_both=1, num_prefill=1)
    assert names_of(beside, run_directory) == ["prefill-0", "both-0"]


@pytest.mark.parametrize(
    "numbers", [{"num_prefill": 0}, {"num_decode": 0}, {"num_prefill": 0, "num_decode": 0}]
)
def test_a_cluster_without_one_of_the_roles_is_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="at least 1 each, or num_both"):
        Config(**numbers)


def test_others_on_this_host_learn_which_cluster_a_run_belongs_to(
    run_directory: RunDirectory, tmp_path: Path
) -> None:
    with run_directory:
        plan_node(Config(kvcache=KVCacheConfig(pool_bytes=SIZE)), run_directory)
        [(path, run)] = running()
        assert path == run_directory.path
        assert run == Run("all", f"ipc://{run_directory.socket('conductor')}", 8000)
        ClusterKey.generate().save(tmp_path / "key")
        security = SecurityConfig(key_file=tmp_path / "key")
        plan_node(
            Config(role="decode", kvcache=KVCacheConfig(pool_bytes=SIZE), security=security), run_directory
        )
        assert [run for _, run in running()] == [Run("decode", "tcp://127.0.0.1:7800", None)]
    assert list(running()) == []


def test_each_rank_has_a_messenger_and_knows_where_to_find_the_first(run_directory: RunDirectory) -> None:
    config = Config(
        kvcache=KVCacheConfig(pool_bytes=SIZE), num_decode=1, worker=WorkerConfig(tensor_parallel=3)
    )
    specs = plan_node(config, run_directory)
    names = [f"{role}-0.{rank}" for role in ("prefill", "decode") for rank in range(3)]
    assert [spec.name for spec in specs] == [
        "conductor",
        *(process for name in names for process in (f"{name}/messenger", name)),
    ]
    workers = [
        WorkerProcess.model_validate_json(spec.config(Life(1))) for spec in specs if spec.name in names
    ]
    assert [worker.part for worker in workers] == names
    assert [worker.rank.number for worker in workers] == [0, 1, 2] * 2
    for group in (workers[:3], workers[3:]):
        assert len({worker.rank.meeting for worker in group}) == 1
        assert len({tuple(worker.rank.endpoints) for worker in group}) == 1
    assert len({endpoint for worker in workers for endpoint in worker.rank.endpoints}) == 4
    assert len({worker.messenger_socket for worker in workers}) == 6


def test_a_stage_may_listen_elsewhere_than_it_is_found(run_directory: RunDirectory, tmp_path: Path) -> None:
    ClusterKey.generate().save(tmp_path / "key")
    config = Config(
        role="prefill",
        instance="p",
        kvcache=KVCacheConfig(pool_bytes=SIZE),
        pipeline=PipelineConfig(
            stages=3,
            stage=1,
            endpoints=["tcp://a:7301", "tcp://b:7302"],
            listen_endpoint="tcp://0.0.0.0:7400",
        ),
        security=SecurityConfig(key_file=tmp_path / "key"),
    )
    [spec] = [spec for spec in plan_node(config, run_directory) if spec.name == "p.1"]
    stage = WorkerProcess.model_validate_json(spec.config(Life(1))).stage
    assert (stage.endpoints, stage.listens_at) == (["tcp://a:7301", "tcp://b:7302"], "tcp://0.0.0.0:7400")
    assert stage.model_copy(update={"listen_endpoint": None}).listens_at == "tcp://b:7302"


def test_a_front_is_alone_on_its_node_and_has_a_name_of_its_own(
    run_directory: RunDirectory, tmp_path: Path
) -> None:
    ClusterKey.generate().save(tmp_path / "key")
    config = Config(role="front", security=SecurityConfig(key_file=tmp_path / "key"))
    [spec] = plan_node(config, run_directory)
    front = FrontProcess.model_validate_json(spec.config(Life(7)))
    assert front.incarnation == 7
    with RunDirectory() as other:
        [spec] = plan_node(config, other)
        assert FrontProcess.model_validate_json(spec.config(Life(7))).name != front.name


def test_door_for_clients_of_other_hosts_needs_a_key_that_they_can_have(run_directory: RunDirectory) -> None:
    config = Config(kvcache=KVCacheConfig(pool_bytes=SIZE, listen="0.0.0.0:7100"))
    with pytest.raises(ConfigError, match=r"kvcache.listen is for clients.*mooncake-serve keygen"):
        plan_node(config, run_directory)


def keys_of(config: Config, run_directory: RunDirectory) -> set[str]:
    """The cluster keys that the processes of a node are given."""
    specs = plan_node(config, run_directory)
    for spec in specs:
        for descriptor in spec.pass_fds:
            os.close(descriptor)
    return {json.loads(spec.config(Life(1)))["cluster_key"] for spec in specs}


def test_all_processes_of_a_node_get_one_key_that_is_new_in_each_run(run_directory: RunDirectory) -> None:
    config = Config(kvcache=KVCacheConfig(pool_bytes=SIZE))
    [first], [second] = keys_of(config, run_directory), keys_of(config, run_directory)
    assert ClusterKey.from_text(first) != ClusterKey.from_text(second)


@pytest.mark.parametrize("role", ["all", "conductor", "prefill", "decode", "front"])
def test_key_comes_from_the_file_that_the_configuration_names(
    run_directory: RunDirectory, tmp_path: Path, role: str
) -> None:
    key = ClusterKey.generate()
    key.save(tmp_path / "key")
    flags = {
        ("role",): role,
        ("security", "key_file"): str(tmp_path / "key"),
        ("kvcache", "pool_bytes"): "4MiB",
    }
    assert keys_of(load_config(None, {}, flags), run_directory) == {key.to_text()}


@pytest.mark.parametrize("role", ["conductor", "prefill", "decode", "front"])
def test_one_role_of_a_cluster_needs_a_key_and_says_how_to_make_it(
    run_directory: RunDirectory, role: str
) -> None:
    with pytest.raises(ConfigError, match=rf"role {role} needs security.key_file.*mooncake-serve keygen"):
        plan_node(load_config(None, {}, {("role",): role}), run_directory)


def test_key_of_a_child_is_neither_shown_nor_quoted_in_errors() -> None:
    key = ClusterKey.generate()
    process = ConductorProcess(cluster_key=key, config=Config(), epoch=1, state_file=Path("/state.db"))
    assert key.to_text() not in repr(process)
    assert ConductorProcess.model_validate_json(process.model_dump_json()) == process
    damaged = process.model_dump_json().replace(key.to_text(), key.to_text()[:-9])
    with pytest.raises(ConfigError) as error:
        ConductorProcess.model_validate_json(damaged)
    assert key.to_text()[-20:-9] not in str(error.value)


def test_memory_that_is_there_already_is_not_asked_for_again(
    run_directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(kvcache=KVCacheConfig(pool_bytes=SIZE, segment_dir=tmp_path), num_decode=1)
    for spec in plan_node(config, run_directory):
        for descriptor in spec.pass_fds:
            os.close(descriptor)
    monkeypatch.setattr("mooncake.node.segments.available_bytes", lambda: SIZE // 2)
    assert len(plan_node(config, run_directory)) == 5
    (tmp_path / "decode-0.segment").unlink()
    with pytest.raises(ConfigError, match="the pool on this node takes"):
        plan_node(config, run_directory)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {("kvcache", "low_watermark"): "0.3"},
            "kvcache.low_watermark 0.3 is above kvcache.high_watermark 0.05",
        ),
        ({("kvcache", "vllm_replay"): "tcp://*:1"}, "kvcache.vllm_replay has no effect without vllm_events"),
        ({("kvcache", "ssd_dirs"): "/tmp,/usr,/tmp/"}, "kvcache.ssd_dirs: a directory is named twice"),
        (
            {("kvcache", "listen"): "0.0.0.0:70000"},
            "kvcache.listen: expected a port up to 65535, found '0.0.0.0:70000'",
        ),
        (
            {("kvcache", "vllm_events"): "tcp://h:65536"},
            "kvcache.vllm_events: expected a port up to 65535, found 'tcp://h:65536'",
        ),
        ({("kvcache", "vllm_events"): "*:5557"}, "kvcache.vllm_events: .*'\\*:5557'"),
        ({("kvcache", "eviction"): "fifo"}, "kvcache.eviction: .*'lru', 'lfu' or 'length_aware'.*'fifo'"),
        ({("kvcache", "listen"): "7100"}, "kvcache.listen: .*'7100'"),
        ({("worker", "metrics_listen"): ":9100"}, "worker.metrics_listen: .*':9100'"),
        (
            {("worker", "metrics_listen"): "h:65536"},
            "worker.metrics_listen: expected a port up to 65535, found 'h:65536'",
        ),
        (
            {("http", "admin_listen"): "h:65536"},
            "http.admin_listen: expected a port up to 65535, found 'h:65536'",
        ),
        (
            {("conductor", "endpoint"): "tcp://h:65536"},
            "conductor.endpoint: expected a port up to 65535, found 'tcp://h:65536'",
        ),
        (
            {("conductor", "reply_endpoint"): "tcp://h:70000"},
            "conductor.reply_endpoint: expected a port up to 65535, found 'tcp://h:70000'",
        ),
        ({("role",): "front", ("instance",): "f"}, "instance names one instance"),
        (
            {("role",): "decode", ("kvcache", "ssd_dirs"): "/ssd"},
            "kvcache.ssd_dirs keeps files by the name of the instance",
        ),
    ],
)
def test_values_that_make_no_sense_are_refused(flags: dict[tuple[str, ...], str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, {}, flags)


def test_directory_that_cannot_hold_slabs_is_refused_at_start(
    run_directory: RunDirectory, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "missing", tmp_path / "file"):
        config = Config(kvcache=KVCacheConfig(pool_bytes=SIZE, ssd_dirs=[path]))
        with pytest.raises(ConfigError, match=f"kvcache.ssd_dirs: {path} is no directory"):
            plan_node(config, run_directory)


def test_directories_are_given_as_one_string_or_a_list(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("kvcache: {ssd_dirs: [/a, /b]}")
    expected = [Path("/a"), Path("/b")]
    assert load_config(file, {}, {}).kvcache.ssd_dirs == expected
    assert load_config(None, {"MOONCAKE_KVCACHE_SSD_DIRS": "/a,/b"}, {}).kvcache.ssd_dirs == expected


@pytest.mark.parametrize("size_bytes", [4096, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 8192])
def test_mapping_begins_where_a_huge_page_does_and_lasts_as_long_as_its_views(size_bytes: int) -> None:
    descriptor = os.memfd_create("test")
    os.posix_fallocate(descriptor, 0, size_bytes)
    maps_before = Path("/proc/self/maps").read_text().count("memfd:test")
    memory = MappedFile(descriptor, size_bytes)
    view = memory.view
    assert len(view) == size_bytes
    view[-1] = 7
    assert os.pread(descriptor, 1, size_bytes - 1) == b"\x07"
    line = next(line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:test" in line)
    assert int(line.split("-")[0], 16) % HUGE_PAGE_BYTES == 0
    os.close(descriptor)
    del memory
    assert view[-1] == 7
    del view
    assert Path("/proc/self/maps").read_text().count("memfd:test") == maps_before


def test_a_pool_alone_is_one_messenger_at_the_users_socket(
    run_directory: RunDirectory, short_tmp_path: Path
) -> None:
    kvcache = KVCacheConfig(pool_bytes=SIZE, socket=short_tmp_path / "pool.sock")
    [spec] = plan_node(Config(role="pool", instance="a", kvcache=kvcache), run_directory)
    told = json.loads(spec.config(Life(1)))
    assert (spec.name, spec.module) == ("a/messenger", "kvstore.server.service")
    assert told["worker_socket"] == str(short_tmp_path / "pool.sock")
    assert os.readlink(run_directory.socket("worker-0")) == str(short_tmp_path / "pool.sock")
    assert all(endpoint.startswith("ipc://") for endpoint in told["event_endpoints"])
    [(_, run)] = running()
    assert run.role == "pool"
    assert run.http_port is None


def test_instances_of_a_node_have_sockets_of_their_own(
    run_directory: RunDirectory, short_tmp_path: Path
) -> None:
    kvcache = KVCacheConfig(pool_bytes=SIZE, socket=short_tmp_path / "pool.sock")
    specs = plan_node(Config(kvcache=kvcache, num_decode=1), run_directory)
    sockets = [
        json.loads(spec.config(Life(1)))["worker_socket"]
        for spec in specs
        if spec.name.endswith("/messenger")
    ]
    assert sockets == [str(short_tmp_path / "pool.sock"), str(short_tmp_path / "pool.sock-1")]


def test_a_pool_that_others_reach_needs_their_key(run_directory: RunDirectory) -> None:
    kvcache = KVCacheConfig(pool_bytes=SIZE, listen="127.0.0.1:7000")
    with pytest.raises(ConfigError, match=r"kvcache\.listen is for clients on other hosts"):
        plan_node(Config(role="pool", kvcache=kvcache), run_directory)


def state_file_of(config: Config, run_directory: RunDirectory) -> Path:
    specs = plan_node(config, run_directory)
    [conductor] = [spec for spec in specs if spec.module == "conductor.process.service"]
    return Path(json.loads(conductor.config(Life(1)))["state_file"])


def test_what_outlives_a_conductor_has_a_place_for_each_port(
    run_directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(port: int, **conductor: Any) -> Config:
        return Config(
            kvcache=KVCacheConfig(pool_bytes=SIZE),
            http=HttpConfig(port=port),
            conductor=ConductorConfig(**conductor),
        )

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "mooncake-serve"
    assert state_file_of(config(8000), run_directory) == folder / "conductor-8000.db"
    assert state_file_of(config(8001), run_directory) == folder / "conductor-8001.db"
    assert state_file_of(config(0), run_directory).parent == run_directory.path
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    usual = tmp_path / "home/.local/state/mooncake-serve/conductor-8000.db"
    assert state_file_of(config(8000), run_directory) == usual
    monkeypatch.chdir(tmp_path)
    named = config(8000, state_file=Path("own.db"))
    assert state_file_of(named, run_directory) == tmp_path / "own.db"


@pytest.mark.parametrize(
    ("flags", "draining"),
    [
        ({}, ["conductor"]),
        ({"num_prefill": "1", "num_decode": "2"}, ["conductor"]),
        ({"role": "conductor"}, ["conductor"]),
        ({"role": "front"}, ["front"]),
        ({"role": "decode", "instance": "d0"}, ["d0"]),
        ({"role": "prefill", "instance": "p0", "pipeline__stages": "2"}, ["p0.0"]),
        ({"role": "pool", "instance": "e0"}, []),
    ],
)
def test_what_has_the_requests_of_the_node_drains_before_the_rest_ends(
    run_directory: RunDirectory, tmp_path: Path, flags: dict[str, str], draining: list[str]
) -> None:
    ClusterKey.generate().save(tmp_path / "key")
    flags = {"kvcache__pool_bytes": "4MiB", "security__key_file": str(tmp_path / "key"), **flags}
    config = load_config(None, {}, {tuple(key.split("__")): value for key, value in flags.items()})
    assert [spec.name for spec in plan_node(config, run_directory) if spec.drains] == draining
