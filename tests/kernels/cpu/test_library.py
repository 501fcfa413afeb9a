"""The choice of an instruction set, and what happens without a compiler."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.cpu import library
from kernels.cpu.library import ENV, Isa, choose, supported_isas
from mooncake import native
from tests.kernels.cpu.isas import SUPPORTED

V3 = "fpu avx avx2 fma bmi1 bmi2 f16c movbe abm"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Choices are made once a process."""
    yield
    for cache in (library._choose, library.load_library, native.load):
        cache.cache_clear()


def test_this_machine_has_a_compiler_and_a_supported_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where this fails, every other test of the engine silently tests torch.
    monkeypatch.delenv(ENV, raising=False)
    choice = choose()
    assert choice.library is not None, choice.reason
    assert choice.name == SUPPORTED[0].value


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"{V4} avx512_bf16 amx_tile amx_bf16", list(Isa)),
        (f"{V4} avx512_bf16", [Isa.AVX512_BF16, Isa.AVX512, Isa.AVX2]),
        (V4, [Isa.AVX512, Isa.AVX2]),
        (V3, [Isa.AVX2]),
        (f"{V4} avx512_bf16".replace("avx512dq", ""), [Isa.AVX2]),
        ("fpu sse2", []),
    ],
)
def test_supported_instruction_sets_are_listed_the_best_first(flags: str, expected: list[Isa]) -> None:
    assert (
        supported_isas(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: avx2\n\nprocessor\t: 1\n") == expected
    )


def test_a_processor_without_flags_has_none() -> None:
    assert supported_isas("processor\t: 0\nFeatures\t: fp asimd\n") == []


@pytest.mark.parametrize("isa", SUPPORTED)
def test_the_environment_forces_a_lower_instruction_set(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, isa.value)
    assert choose().name == isa.value


def test_the_environment_forces_torch_without_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENV, "torch")
    assert (choose().library, choose().name) == (None, "torch")
    assert not caplog.records


def test_an_unknown_name_is_refused_with_those_that_this_processor_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENV, "sse9")
    with pytest.raises(
        ValueError, match=r"MOONCAKE_CPU_KERNELS: this processor has auto, .*torch, got 'sse9'"
    ):
        choose()


def test_without_a_compiler_torch_computes_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(ENV, raising=False)
    for cache in (library._choose, library.load_library, native.load):
        cache.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    choices = [choose() for _ in range(3)]
    assert {choice.library for choice in choices} == {None}
    assert choices[0].name == "torch"
    assert "no C++ compiler: no-such-compiler" in choices[0].reason
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "torch computes" in warnings[0].getMessage()


def test_what_cannot_be_compiled_is_a_reason_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(ENV, raising=False)
    for cache in (library._choose, library.load_library, native.load):
        cache.cache_clear()
    broken = tmp_path / "kernels.cpp"
    broken.write_text("this is not C++")
    monkeypatch.setattr(library, "_SOURCE", broken)
    assert "cannot compile" in choose().reason
