"""Ranks in processes of their own: the same bits as in threads; who loses another hears of it.

A rank of a group for which there are GPUs computes on one, over NCCL; others on CPUs, over gloo.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from tests.workers.engine.group_rank import LOST, device_of, generate_of
from tests.workers.engine.ranks import DEADLINE_S, ThreadGroup, on_ranks
from workers.engine.process_group import shard_of
from workers.engine.tensor_parallel import RankLost

ROOT = Path(__file__).parents[3]


@contextmanager
def started(
    folder: Path, ranks: range, size: int, timeout_s: float, work: str
) -> Iterator[list[subprocess.Popen[str]]]:
    with ExitStack() as stack:
        processes = []
        for rank in ranks:
            arguments = [str(folder), str(rank), str(size), str(timeout_s), work, str(len(ranks))]
            command = [sys.executable, "-m", "tests.workers.engine.group_rank", *arguments]
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        yield processes


@pytest.mark.parametrize("size", [1, 3])
def test_processes_compute_the_bits_that_threads_do(size: int, tmp_path: Path) -> None:
    with started(tmp_path, range(size), size, DEADLINE_S, "generate") as processes:
        assert [process.wait(DEADLINE_S) for process in processes] == [0] * size
    group = ThreadGroup(size)
    outcomes = on_ranks(size, lambda rank: generate_of(group.shards[rank], device_of(rank, size)))
    for rank, expected in enumerate(outcomes):
        got = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert got.tokens == expected.tokens
        assert all(map(torch.equal, got.logits, expected.logits))
        assert all(map(torch.equal, got.kv, expected.kv))


@pytest.mark.parametrize(
    ("end", "timeout_s"),
    [(signal.SIGKILL, 10 * DEADLINE_S), (signal.SIGSTOP, 4.0)],
    ids=["killed", "stopped"],
)
def test_a_rank_that_is_gone_fails_the_others_in_time(
    end: signal.Signals, timeout_s: float, tmp_path: Path
) -> None:
    with started(tmp_path, range(3), 3, timeout_s, "sum") as processes:
        assert [process.stdout and process.stdout.readline() for process in processes] == ["3.0\n"] * 3
        os.kill(processes[1].pid, end)
        for rank in (0, 2):
            assert processes[rank].wait(DEADLINE_S) == LOST
            said = processes[rank].stdout
            assert said is not None
            assert f"rank {rank} of 3 has lost another" in said.read()


def test_a_rank_outside_of_any_group_has_lost_the_others() -> None:
    shard = shard_of(0, 2, torch.device("cpu"))
    for call in (shard.all_reduce, shard.all_gather):
        with pytest.raises(RankLost, match="in no group"):
            call(torch.ones(3))


def test_a_rank_that_does_not_come_is_not_waited_for_longer_than_the_timeout(tmp_path: Path) -> None:
    with started(tmp_path, range(1), 2, 1.0, "sum") as [process]:
        assert process.wait(DEADLINE_S) == LOST
        assert process.stdout is not None
        assert "rank 0 of 2 has not met all others in 1.0 s" in process.stdout.read()
