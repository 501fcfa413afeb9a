"""The limits of the device itself, measured in the same run as the kernels.

Owns: the timer, the two ceilings, rows of a table. Does not know: kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.report import Report

_COPY_BYTES = 2 << 30
_MATRIX_SIZE = 8192
_NUM_RUNS = 20


def seconds(call: Callable[[], object], num_runs: int = _NUM_RUNS) -> float:
    """Return the median seconds of the device for one call, after three calls to warm up."""
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
    """The two ceilings of the device.

    `copy_rate`: bytes a second that a copy reads and writes. `matrix_rate`: FLOP a second of a bfloat16
    product of random matrices.
    """

    copy_rate: float
    matrix_rate: float
    report: Report

    @classmethod
    def measure(cls, report: Report) -> "Ceilings":
        """Measure both ceilings, and make them the first table of `report`. `begin` begins further tables."""
        source = torch.empty(_COPY_BYTES // 4, device="cuda").normal_()
        target = torch.empty_like(source)
        copy_rate = 2 * _COPY_BYTES / seconds(lambda: target.copy_(source))
        a, b = torch.randn(2, _MATRIX_SIZE, _MATRIX_SIZE, dtype=torch.bfloat16, device="cuda")
        matrix_rate = 2 * _MATRIX_SIZE**3 / seconds(lambda: a @ b)
        report.table("The device's ceilings", "", "rate")
        report.row("device copy", f"{copy_rate / 1e9:.0f} GB/s", name="copy", rate=copy_rate)
        rate = f"{matrix_rate / 1e12:.0f} TFLOP/s"
        report.row(f"product of {_MATRIX_SIZE}^3, bfloat16", rate, name="product", rate=matrix_rate)
        return cls(copy_rate, matrix_rate, report)

    def begin(self, title: str) -> None:
        """Begin a table with this title."""
        self.report.table(title, "", "time", "rate", "of the ceiling", "bar")

    def bytes_row(self, name: str, num_bytes: int, time_s: float, bar: float | None = None) -> None:
        """Add a row to the table: the rate of bytes as a share of the copy's rate.

        `bar`: the least share that passes; None: any share passes.
        """
        rate = num_bytes / time_s
        self._row(name, f"{rate / 1e9:.0f} GB/s", time_s, rate, rate / self.copy_rate, bar)

    def flops_row(self, name: str, num_flops: int, time_s: float, bar: float | None = None) -> None:
        """Add a row to the table: the rate of FLOP as a share of the matrix product's rate.

        `bar`: the least share that passes; None: any share passes.
        """
        rate = num_flops / time_s
        self._row(name, f"{rate / 1e12:.0f} TFLOP/s", time_s, rate, rate / self.matrix_rate, bar)

    def _row(
        self, name: str, rate_text: str, time_s: float, rate: float, share: float, bar: float | None
    ) -> None:
        is_met = bar is None or share >= bar
        self.report.is_good &= is_met
        verdict = "" if bar is None else f"{bar:.0%} {'met' if is_met else '**MISSED**'}"
        cells = (name, f"{1e6 * time_s:.0f} us", rate_text, f"{share:.0%}", verdict)
        self.report.row(*cells, name=name, time_s=time_s, rate=rate, share=share, bar=bar, is_met=is_met)
