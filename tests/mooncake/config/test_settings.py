import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kernels.cpu.library import ENV
from mooncake.cli.commands import render
from mooncake.config.settings import Config, env_name, host_and_port, leaf_keys, load_config
from mooncake.errors import ConfigError
from mooncake.messages.workers import Role
from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parents[3]


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("http: {port: 1, host: a}\nkvcache: {pool_bytes: 2GiB}\n")
    environ = {"MOONCAKE_HTTP_PORT": "2", "MOONCAKE_HTTP_HOST": "b"}
    config = load_config(file, environ, {("http", "port"): "3"})
    assert (config.http.port, config.http.host, config.kvcache.pool_bytes) == (3, "b", 2 << 30)


def test_an_empty_section_is_one_of_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("http:\nkvcache:\n  block_size: 8\n")
    assert load_config(file, {}, {}).http == Config().http


def test_yaml_merge_keys_work(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("kvcache: &sizes {block_size: 8}\nhttp: {port: 81}\nworker: {max_batch: 3}\n")
    assert load_config(file, {}, {}).kvcache.block_size == 8
    file.write_text("http: {<<: {port: 82}, host: a}\n")
    assert load_config(file, {}, {}).http.port == 82


def test_variables_that_kubernetes_sets_are_not_ours() -> None:
    service = {"MOONCAKE_PORT": "tcp://10.0.0.1:80", "MOONCAKE_SERVICE_HOST": "10.0.0.1"}
    service |= {"MOONCAKE_PORT_80_TCP_ADDR": "10.0.0.1", "MOONCAKE_SERVE_SERVICE_PORT_HTTP": "80"}
    assert load_config(None, service, {}) == Config()
    assert load_config(None, {**service, "MOONCAKE_HTTP_PORT": "81"}, {}).http.port == 81


def test_defaults_need_no_source() -> None:
    assert load_config(None, {}, {}) == Config()


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [
        ({}, {Role.BOTH: 1}),
        ({"num_both": "2"}, {Role.BOTH: 2}),
        ({"num_prefill": "2"}, {Role.PREFILL: 2, Role.DECODE: 1}),
        ({"num_decode": "3"}, {Role.PREFILL: 1, Role.DECODE: 3}),
        ({"num_both": "0"}, {Role.PREFILL: 1, Role.DECODE: 1}),
        ({"num_both": "1", "num_prefill": "1"}, {Role.PREFILL: 1, Role.BOTH: 1}),
        ({"worker.tensor_parallel": "2"}, {Role.BOTH: 1}),
        ({"engine": "vllm"}, {Role.BOTH: 1}),
        ({"pipeline.stages": "2"}, {Role.PREFILL: 1, Role.DECODE: 1}),
        ({"worker.prefill_layer_window": "4"}, {Role.PREFILL: 1, Role.DECODE: 1}),
        ({"role": "both"}, {Role.BOTH: 1}),
        ({"role": "conductor"}, {}),
    ],
    ids=str,
)
def test_one_instance_does_both_unless_others_are_asked_for(
    flags: dict[str, str], numbers: dict[Role, int]
) -> None:
    config = load_config(None, {}, {tuple(key.split(".")): value for key, value in flags.items()})
    assert {role: count for role, count in config.num_instances.items() if count} == numbers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("htp: {port: 1}", ["htp: unknown key", "c.yaml", "did you mean http?", "kvcache"]),
        ("http: {prot: 1}", ["http.prot: unknown key", "mean http.port?", "host, max_request_bytes, port"]),
        ("num-prefill: 2", ["num-prefill: unknown key", "did you mean num_prefill?"]),
        ("max_batch: 2", ["max_batch: unknown key", "did you mean worker.max_batch?"]),
        ("http: {block_size: 2}", ["http.block_size: unknown key", "did you mean kvcache.block_size?"]),
        ("quite: other", ["quite: unknown key", "; known keys here are cluster, conductor"]),
        ("http: {port: 70000}", ["http.port: Input should be less than or equal to 65535", "70000"]),
        ("http: 3", ["http: expected keys and values", "3"]),
        ("role: all\nrole: decode", ["role is given twice"]),
        ("http: {port: 1, port: 2}", ["port is given twice"]),
        ("dtype: int8", ["dtype:", "'auto', 'float32', 'bfloat16' or 'float16'"]),
        ("{role: decode, num_decode: 3}", ["num_both need role all, not decode"]),
        ("instance: x", ["instance names one instance"]),
        (
            "{num_both: 1, pipeline: {stages: 2}}",
            ["pipeline.stages", "give num_prefill a number"],
        ),
        ("worker: {mixed_chunk_tokens: 99999999999999999999}", ["worker.mixed_chunk_tokens"]),
        ("kvcache: {pool_bytes: many}", ["kvcache.pool_bytes:", "many"]),
        ("worker: {num_threads: some}", ["worker.num_threads", "some"]),
        (
            "messenger: {transport: pigeon}",
            ["messenger.transport:", "'auto', 'shm', 'rdma' or 'tcp'", "pigeon"],
        ),
        ("worker: {device: tpu}", ["worker.device:", "tpu"]),
        (
            "{role: front, conductor: {reply_endpoint: 'tcp://0.0.0.0:7801'}}",
            [
                "conductor.reply_endpoint tcp://0.0.0.0:7801 is what other nodes are told",
                "reply_listen_endpoint",
            ],
        ),
        ("{role: decode, conductor: {endpoint: 'tcp://[::]:7801'}}", ["conductor.listen_endpoint may be"]),
        ("{role: decode, messenger: {hosts: '10.0.0.1,0.0.0.0'}}", ["messenger.listen_hosts may be 0.0.0.0"]),
        (
            "{role: prefill, instance: p, pipeline: {stages: 2, stage: 0, endpoints: 'tcp://0.0.0.0:7900'}}",
            ["pipeline.listen_endpoint may be tcp://0.0.0.0:7900"],
        ),
        (
            "pipeline: {stages: 2, stage: 1, endpoints: 'tcp://h:7900', listen_endpoint: 'tcp://*:7900'}",
            ["pipeline.listen_endpoint is for a stage with another one behind it"],
        ),
        ("messenger: {hosts: 'a,b,c', listen_hosts: 'a,b'}", ["listen at one, or at one for each"]),
        (
            "conductor: {endpoint: 10.0.0.1:7800}",
            ["conductor.endpoint: expected tcp://host:port, tcp://[IPv6]:port or ipc://path, found"],
        ),
        ("conductor: {slo_classes: '{'}", ["conductor.slo_classes: expected a JSON object", "found '{'"]),
        ("conductor: {slo_classes: {a: {x: 1}}}", ["conductor.slo_classes.a.x: unknown key"]),
        ("conductor: {slo_classes: {a: {ttft_slo_s: 0}}}", ["conductor.slo_classes.a.ttft_slo_s: Input"]),
        (
            "worker: {num_threads: 0}",
            ["worker.num_threads: Input", "equal to 1, or Input should be 'auto', found 0"],
        ),
        (
            "{role: front, cluster: {etcd_endpoints: '10.0.0.1:2379'}}",
            ["cluster.etcd_endpoints.0: expected http://host:port or https://host:port, found '10.0.0.1:"],
        ),
        ("{role: front, cluster: {etcd_endpoints: 'http://h:1', etcd_ca: f}}", ["etcd_ca", "https://"]),
        ("{role: front, cluster: {etcd_endpoints: 'https://h:1', etcd_cert: f}}", ["etcd_key go together"]),
        ("{role: front, cluster: {etcd_endpoints: 'https://h:1', etcd_user: a}}", ["etcd_password_file go"]),
        ("{role: front, cluster: {etcd_prefix: /a/}}", ["cluster.etcd_prefix: expected a path such as"]),
        ("cluster: {etcd_ca: f}", ["cluster.etcd_ca has no effect without cluster.etcd_endpoints"]),
        ("cluster: {etcd_endpoints: 'http://h:1'}", ["cluster.etcd_endpoints", "not role all"]),
        ("http: {admin_listen: '::1:9000'}", ["http.admin_listen:", "::1:9000"]),
        ("[1, 2]", ["expected keys and values, found list"]),
        (
            "http.port: 1",
            ["http.port: unknown key (", "); in a file its section stands around it, as in http: {"],
        ),
        ("a: b: c", ["c.yaml is not valid YAML: line 1, column 5: mapping values are not allowed here"]),
        (
            "http: {\n  port: 1\n",
            ["line 3, column 1: ", "(while parsing a flow mapping that begins in line 1)"],
        ),
    ],
)
def test_bad_files_are_refused_by_key(tmp_path: Path, text: str, expected: list[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(file, {}, {})
    for part in expected:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("endpoints", "message"),
    [
        ("tcp://10.0.0.1:*,tcp://10.0.0.2:1", r"tcp://10.0.0.1:\* needs a port from 1 to 65535"),
        ("tcp://10.0.0.1:0,tcp://10.0.0.2:1", "tcp://10.0.0.1:0 needs a port"),
        ("tcp://10.0.0.1:1,tcp://10.0.0.2:70000", "tcp://10.0.0.2:70000 needs a port"),
        ("tcp://10.0.0.1:1,tcp://10.0.0.1:1", "tcp://10.0.0.1:1 twice"),
        ("tcp://10.0.0.1:1", "names 1 endpoints; 3 stages need 2"),
        (
            "10.0.0.1:1,tcp://10.0.0.2:1",
            r"pipeline.endpoints.0: expected tcp://host:port, tcp://\[IPv6\]:port or ipc://path",
        ),
    ],
)
def test_stages_must_be_able_to_find_each_other(endpoints: str, message: str) -> None:
    flags = {
        ("role",): "prefill",
        ("instance",): "p",
        ("pipeline", "stages"): "3",
        ("pipeline", "stage"): "0",
        ("pipeline", "endpoints"): endpoints,
    }
    with pytest.raises(ConfigError, match=message):
        load_config(None, {}, flags)
    load_config(None, {}, {**flags, ("pipeline", "endpoints"): "tcp://10.0.0.1:1,ipc:///run/stage"})


def test_stage_of_an_instance_that_has_none_is_refused() -> None:
    flags = {("role",): "prefill", ("instance",): "p", ("pipeline", "stage"): "0"}
    with pytest.raises(ConfigError, match=r"pipeline\.stage needs pipeline\.stages of 2"):
        load_config(None, {}, flags)


def test_stages_of_ranks_are_refused() -> None:
    flags = {("pipeline", "stages"): "2", ("worker", "tensor_parallel"): "2"}
    with pytest.raises(
        ConfigError, match=r"pipeline.stages 2 and worker.tensor_parallel 2 do not go together"
    ):
        load_config(None, {}, flags)


@pytest.mark.parametrize(
    ("address", "parts"), [("10.0.0.1:9000", ("10.0.0.1", 9000)), ("[fd00::1]:9000", ("fd00::1", 9000))]
)
def test_addresses_of_both_kinds_are_taken_apart(address: str, parts: tuple[str, int]) -> None:
    config = load_config(None, {}, {("http", "admin_listen"): address})
    assert config.http.admin_listen == address
    assert host_and_port(address) == parts


def test_the_variable_of_the_cpus_kernels_is_no_key() -> None:
    assert load_config(None, {ENV: "avx2"}, {}) == load_config(None, {}, {})


def test_bad_sources_are_named() -> None:
    with pytest.raises(ConfigError, match=r"MOONCAKE_HTTP_PROT: unknown variable.*MOONCAKE_HTTP_PORT"):
        load_config(None, {"MOONCAKE_HTTP_PROT": "1"}, {})
    with pytest.raises(ConfigError, match=r"http.port: .*'x' \(MOONCAKE_HTTP_PORT\)"):
        load_config(None, {"MOONCAKE_HTTP_PORT": "x"}, {})
    with pytest.raises(ConfigError, match=r"worker.prefill_chunk: .*'0' \(--worker-prefill-chunk\)"):
        load_config(None, {}, {("worker", "prefill_chunk"): "0"})
    with pytest.raises(ConfigError, match="cannot read the configuration /no/such"):
        load_config(Path("/no/such"), {}, {})


def test_shipped_configurations_are_valid() -> None:
    files = sorted((ROOT / "configs").glob("*.yaml"))
    assert [file.name for file in files] == ["cluster.yaml", "local-cpu.yaml", "single-gpu.yaml"]
    for file in files:
        load_config(file, {}, {})


def test_no_two_keys_share_a_variable() -> None:
    names = [env_name(path) for path in leaf_keys()]
    assert len(names) == len(set(names))


def test_printed_configuration_is_accepted_again(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    config = load_config(None, {}, {("kvcache", "pool_bytes"): "3MiB", ("model",): "/a"})
    file.write_text(render(config))
    assert load_config(file, {}, {}) == config


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mooncake", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_print_config_shows_the_result_of_all_sources() -> None:
    result = run_command("--config", "configs/local-cpu.yaml", "--port", "8123", "--print-config")
    assert yaml.safe_load(result.stdout)["http"]["port"] == 8123
    assert result.returncode == 0


def test_command_line_errors_are_one_line() -> None:
    result = run_command("--http-port", "x")
    assert result.returncode == 2
    assert result.stderr.startswith("error: http.port:")
    assert result.stderr.count("\n") == 1
    assert run_command("--no-such-flag").returncode == 2


def test_a_measurement_takes_the_configuration_on_either_side_of_its_name(tmp_path: Path) -> None:
    for arguments in (["--port", "x", "profile", "f"], ["profile", "f", "--port", "x"]):
        result = run_command(*arguments)
        assert result.stderr.startswith("error: http.port:"), result.stderr
        assert result.returncode == 2


def test_help_names_choices_and_defaults() -> None:
    text = " ".join(run_command("--help-all").stdout.split())
    assert "--worker-max-batch N most requests decoded together (default: 32)" in text
    assert "one of all, conductor, prefill, decode, both, front, pool (default: all)" in text
    assert "(default: 1.0GiB)" in text
