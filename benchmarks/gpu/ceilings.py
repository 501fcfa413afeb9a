"""What the device itself can do, measured in the same run as what is compared with it.

Owns: the timer, the two ceilings, rows of a table. Does not know: kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

_COPY_BYTES = 2 << 30
_MATRIX_SIZE = 8192
_NUM_RUNS = 20


def seconds(call: Callable[[], object], num_runs: int = _NUM_RUNS) -> float:
    """Median of the device's time for one call, after three to warm up."""
    for _ in range(3):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * num_runs)]  # type: ignore[no-untyped-call]
    for begin, end in zip(marks[::2], marks[1::2], strict=True):
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    times: list[float] = [
        begin.elapsed_time(end) / 1e3 for begin, end in zip(marks[::2], marks[1::2], strict=True)
    ]
    return sorted(times)[num_runs // 2]


@dataclass(slots=True)
class Ceilings:
    """Bytes read and written a second by a copy, FLOP a second of a bfloat16 product of random matrices."""

    copy_rate: float
    matrix_rate: float
    is_met: bool = True
    """Whether every share so far has reached its bar."""

    @classmethod
    def measure(cls) -> "Ceilings":
        """Prints them."""
        source = torch.empty(_COPY_BYTES // 4, device="cuda").normal_()
        target = torch.empty_like(source)
        copy_rate = 2 * _COPY_BYTES / seconds(lambda: target.copy_(source))
        a, b = torch.randn(2, _MATRIX_SIZE, _MATRIX_SIZE, dtype=torch.bfloat16, device="cuda")
        matrix_rate = 2 * _MATRIX_SIZE**3 / seconds(lambda: a @ b)
        print(
            f"device copy {copy_rate / 1e9:.0f} GB/s, "
            f"{_MATRIX_SIZE}^3 bfloat16 {matrix_rate / 1e12:.0f} TFLOP/s"
        )
        return cls(copy_rate, matrix_rate)

    def bytes_row(self, name: str, num_bytes: int, time_s: float, bar: float | None = None) -> None:
        """A row of the table, against the copy."""
        self._row(
            name, f"{num_bytes / time_s / 1e9:.0f} GB/s", time_s, num_bytes / time_s / self.copy_rate, bar
        )

    def flops_row(self, name: str, num_flops: int, time_s: float, bar: float | None = None) -> None:
        """A row of the table, against the product of matrices."""
        rate = num_flops / time_s
        self._row(name, f"{rate / 1e12:.0f} TFLOP/s", time_s, rate / self.matrix_rate, bar)

    def _row(self, name: str, rate: str, time_s: float, share: float, bar: float | None) -> None:
        verdict = "" if bar is None else f"{bar:.0%} {'met' if share >= bar else 'MISSED'}"
        self.is_met &= bar is None or share >= bar
        print(f"| {name} | {1e6 * time_s:.0f} us | {rate} | {share:.0%} | {verdict} |", flush=True)


def header(title: str) -> None:
    """Begins a table."""
    print(f"\n{title}\n\n| | time | rate | of the ceiling | bar |\n|---|---|---|---|---|")
