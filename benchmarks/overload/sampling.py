"""Samples of a server's loads over time, read from its metrics.

Owns: the sampling thread. Does not know: the meaning of loads.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np

PERIOD_S = 0.2
STAGES = ("prefill", "decode")


class LoadSampler:
    """A context manager that samples `mooncake_stage_load` of both stages in a thread."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._rows: list[tuple[float, float, float]] = []
        self._is_over = threading.Event()
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> "LoadSampler":
        self._sampling = self._thread.submit(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop sampling. Raises the error that ended sampling early, if there was one."""
        self._is_over.set()
        with self._thread:
            self._sampling.result()

    @property
    def rows(self) -> "np.ndarray[Any, Any]":
        """The samples as rows: seconds since the beginning, prefill load, decode load."""
        return np.array(self._rows).reshape(-1, 3)

    def _run(self) -> None:
        began_s = time.monotonic()
        with httpx.Client(timeout=10.0) as http:
            while not self._is_over.wait(PERIOD_S):
                text = http.get(f"{self._url}/metrics").raise_for_status().text
                values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] not in ("", "#"))
                loads = [float(values[f'mooncake_stage_load{{stage="{stage}"}}']) for stage in STAGES]
                self._rows.append((time.monotonic() - began_s, loads[0], loads[1]))


def swing(rows: "np.ndarray[Any, Any]", from_s: float, to_s: float) -> float:
    """Return the standard deviation of (prefill load - decode load) in `[from_s, to_s)`."""
    within = rows[(rows[:, 0] >= from_s) & (rows[:, 0] < to_s)]
    return float((within[:, 1] - within[:, 2]).std())
