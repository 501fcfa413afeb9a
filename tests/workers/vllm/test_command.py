"""On which cores vLLM computes."""

import os

import pytest

from mooncake.config.settings import Config
from mooncake.messages.workers import Role
from mooncake.node.process_config import WorkerProcess
from mooncake.security.keys import ClusterKey
from workers.vllm.command import Computing, serve_command

NOT_CHANGED = Computing({}, [])


def process(options: tuple[str, ...] = (), num_local_workers: int = 2, **worker: object) -> WorkerProcess:
    config = Config.model_validate(
        {"engine": "vllm", "model": "/m", "vllm": {"options": list(options)}, "worker": worker}
    )
    return WorkerProcess(
        cluster_key=ClusterKey.generate(),
        config=config,
        role=Role.DECODE,
        instance="decode-0",
        incarnation=1,
        messenger_socket="/run/m.sock",
        modules_socket="/run/h.sock",
        num_local_workers=num_local_workers,
    )


def test_instances_of_a_host_share_its_cores_and_compute_in_the_engine() -> None:
    computing = Computing.of(process(num_local_workers=1), {})
    assert computing.environment["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
    many = Computing.of(process(num_local_workers=1000), {})
    assert many.environment["OMP_NUM_THREADS"] == "1"
    assert "uni" in serve_command(process(), 7, computing)


@pytest.mark.parametrize("inherited", [{}, {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}])
def test_threads_are_the_operators_choice(inherited: dict[str, str]) -> None:
    threads = {"OMP_NUM_THREADS": "7"}
    assert Computing.of(process(), inherited | threads).environment["OMP_NUM_THREADS"] == "7"
    configured = Computing.of(process(num_threads=3), inherited | threads)
    assert configured.environment["OMP_NUM_THREADS"] == "3"


def test_who_binds_vllm_to_cores_or_names_its_executor_is_not_interfered_with() -> None:
    assert Computing.of(process(), {"VLLM_CPU_OMP_THREADS_BIND": "0-3"}) == NOT_CHANGED
    for options in (
        ("--distributed-executor-backend", "mp"),
        ("--distributed-executor-backend=mp",),
        ("--tensor-parallel-size", "2"),
    ):
        assert Computing.of(process(options), {}) == NOT_CHANGED
        assert "uni" not in serve_command(process(options), 7, NOT_CHANGED)
