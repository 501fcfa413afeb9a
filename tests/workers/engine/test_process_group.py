"""Ranks in processes of their own: the same bits as in threads; who loses another hears of it.

A rank of a group for which there are GPUs computes on one, over NCCL; others on CPUs, over gloo.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple, TextIO

import pytest
import torch

from tests.forked import Forked
from tests.workers.engine import group_rank
from tests.workers.engine.group_rank import LOST, device_of, generate_of
from tests.workers.engine.ranks import DEADLINE_S, ThreadGroup, on_ranks
from workers.engine.process_group import shard_of
from workers.engine.tensor_parallel import RankLost


class Rank(NamedTuple):
    """The process of a rank, and what it prints."""

    process: Forked
    said: TextIO


@contextmanager
def started(folder: Path, ranks: range, size: int, timeout_s: float, work: str) -> Iterator[list[Rank]]:
    with ExitStack() as stack:
        processes = []
        for rank in ranks:
            read_fd, write_fd = os.pipe()
            said = stack.enter_context(os.fdopen(read_fd))
            arguments = (folder, rank, size, timeout_s, work, len(ranks))
            process = Forked(
                group_rank.main, *arguments, stdin=0, stdout=write_fd, stderr=2, environ=dict(os.environ)
            )
            os.close(write_fd)
            processes.append(Rank(stack.enter_context(closing(process)), said))
        yield processes


@pytest.mark.parametrize("size", [1, 3])
def test_processes_compute_the_bits_that_threads_do(size: int, tmp_path: Path) -> None:
    with started(tmp_path, range(size), size, DEADLINE_S, "generate") as ranks:
        assert [rank.process.wait(DEADLINE_S) for rank in ranks] == [0] * size
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
    with started(tmp_path, range(3), 3, timeout_s, "sum") as ranks:
        assert [rank.said.readline() for rank in ranks] == ["3.0\n"] * 3
        os.kill(ranks[1].process.pid, end)
        for number in (0, 2):
            assert ranks[number].process.wait(DEADLINE_S) == LOST
            assert f"rank {number} of 3 has lost another" in ranks[number].said.read()


def test_a_rank_outside_of_any_group_has_lost_the_others() -> None:
    shard = shard_of(0, 2, torch.device("cpu"))
    for call in (shard.all_reduce, shard.all_gather):
        with pytest.raises(RankLost, match="in no group"):
            call(torch.ones(3))


def test_a_rank_that_does_not_come_is_not_waited_for_longer_than_the_timeout(tmp_path: Path) -> None:
    with started(tmp_path, range(1), 2, 1.0, "sum") as [rank]:
        assert rank.process.wait(DEADLINE_S) == LOST
        assert "rank 0 of 2 has not met all others in 1.0 s" in rank.said.read()
