"""Compiling at first use: what is compiled again, and what a failure says."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake import native
from mooncake.native import NativeCodeError, NoCompilerError, load

SOURCE = '#include "number.h"\nextern "C" int number() { return NUMBER; }\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Sources, and a cache of their own."""
    monkeypatch.setenv(native.ENV_CACHE, str(tmp_path / "cache"))
    (tmp_path / "number.h").write_text("#ifndef NUMBER\n#define NUMBER 1\n#endif\n")
    (tmp_path / "number.cpp").write_text(SOURCE)
    load.cache_clear()
    yield tmp_path
    load.cache_clear()


def number(folder: Path, *flags: str) -> int:
    load.cache_clear()
    result: int = load(folder / "number.cpp", flags).number()
    return result


def num_libraries(folder: Path) -> int:
    return len(list((folder / "cache").rglob("*.so")))


def test_a_file_is_compiled_once(folder: Path) -> None:
    assert [number(folder), number(folder)] == [1, 1]
    assert num_libraries(folder) == 1


def test_other_flags_give_another_library(folder: Path) -> None:
    assert [number(folder, "-DNUMBER=2"), number(folder), number(folder, "-DNUMBER=2")] == [2, 1, 2]
    assert num_libraries(folder) == 2


def test_a_changed_header_is_noticed(folder: Path) -> None:
    assert number(folder) == 1
    (folder / "number.h").write_text("#define NUMBER 3\n")
    assert number(folder) == 3


def test_an_error_in_the_file_is_told(folder: Path) -> None:
    (folder / "number.cpp").write_text("not C++")
    with pytest.raises(NativeCodeError, match=r"cannot compile .*number\.cpp"):
        load(folder / "number.cpp")
    assert num_libraries(folder) == 0


def test_a_missing_compiler_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NoCompilerError, match="no-such-compiler is not installed"):
        load(folder / "number.cpp")


def test_what_is_compiled_is_told_before_it_takes_its_time(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, native.compile_log.name)
    number(folder)
    number(folder)
    assert caplog.messages == ["compiling number.cpp for this machine, once"]
