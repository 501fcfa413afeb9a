"""Memory that outlives processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake.config.sections import KVCacheConfig
from mooncake.errors import ConfigError
from mooncake.node.mapping import HUGE_PAGE_BYTES, allocate
from mooncake.node.segments import check_memory, create_segment

SIZE = 4 << 20


def test_memory_in_a_file_is_found_again(tmp_path: Path) -> None:
    first = create_segment("decode-0", SIZE, tmp_path)
    os.pwrite(first, b"kept", SIZE - 4)
    os.close(first)
    second = create_segment("decode-0", SIZE, tmp_path)
    assert os.pread(second, 4, SIZE - 4) == b"kept"
    os.close(second)


def test_memory_of_another_size_is_refused_and_kept(tmp_path: Path) -> None:
    os.close(create_segment("decode-0", SIZE, tmp_path))
    with pytest.raises(ConfigError, match=rf"decode-0.segment has {SIZE} bytes, .* is {2 * SIZE}"):
        create_segment("decode-0", 2 * SIZE, tmp_path)
    assert (tmp_path / "decode-0.segment").stat().st_size == SIZE


def test_memory_of_a_live_process_is_refused_by_its_pid(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from mooncake.node.segments import create_segment;"
        f"create_segment('d', {SIZE}, Path({str(tmp_path)!r})); print('here', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "here\n"
        with pytest.raises(
            ConfigError, match=f"belongs to the live process {owner.pid}, this is {os.getpid()}"
        ):
            create_segment("d", SIZE, tmp_path)
        owner.kill()
        owner.wait()
    os.close(create_segment("d", SIZE, tmp_path))


def test_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kvcache.segment_dir: cannot use .*missing.*: No such file"):
        create_segment("d", SIZE, tmp_path / "missing")


@pytest.mark.parametrize("size_bytes", [4096, HUGE_PAGE_BYTES, 17 * HUGE_PAGE_BYTES + 8192])
def test_memory_is_allocated_from_its_first_byte_to_its_last(size_bytes: int) -> None:
    descriptor = create_segment("decode-0", size_bytes)
    status = os.fstat(descriptor)
    assert (status.st_size, status.st_blocks * 512) == (size_bytes, size_bytes)
    assert os.pread(descriptor, size_bytes, 0) == bytes(size_bytes)
    os.close(descriptor)


def test_an_allocation_can_be_given_up() -> None:
    descriptor, answers = os.memfd_create("given up"), iter([False, True])
    allocate(descriptor, 40 * HUGE_PAGE_BYTES, lambda: next(answers))
    status = os.fstat(descriptor)
    assert (status.st_size, status.st_blocks * 512) == (40 * HUGE_PAGE_BYTES, 16 * HUGE_PAGE_BYTES)
    os.close(descriptor)


def test_a_pool_without_a_unit_is_told_by_its_key() -> None:
    kvcache = KVCacheConfig.model_validate({"pool_bytes": "8"})
    with pytest.raises(ConfigError, match=r"kvcache.pool_bytes: 8 bytes are too few .* such as 4GiB"):
        check_memory(["prefill-0"], kvcache)
    check_memory([], kvcache)  # a conductor has none
