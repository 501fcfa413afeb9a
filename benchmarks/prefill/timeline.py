"""The times of stages and chunks, as a Chrome trace (shown by ui.perfetto.dev) and as a picture.

Owns: the two formats. Does not know: how times are measured.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure


class Computed(NamedTuple):
    """One pass of one stage. All times are seconds of one clock."""

    stage: int
    start: int
    """The position of the chunk's first token."""
    num_tokens: int
    begin_s: float
    end_s: float


def passes_of(lines: Sequence[str]) -> list[Computed]:
    """Return the passes that traced workers have recorded, in order of time.

    Stages are numbered in the order of their layers.
    """
    found = [json.loads(line) for line in lines]
    first_layers = sorted({told["first_layer"] for told in found})
    passes = [
        Computed(
            first_layers.index(told["first_layer"]), told["start"], told["n"], told["begin_s"], told["end_s"]
        )
        for told in found
    ]
    return sorted(passes, key=lambda computed: computed.begin_s)


def write_chrome_trace(passes: Sequence[Computed], path: Path) -> None:
    """Write a Chrome trace with one row for each stage. Times are in microseconds since the first pass."""
    origin_s = passes[0].begin_s
    events: list[dict[str, object]] = [
        {
            "name": f"[{p.start}, {p.start + p.num_tokens})",
            "ph": "X",
            "pid": 0,
            "tid": p.stage,
            "ts": 1e6 * (p.begin_s - origin_s),
            "dur": 1e6 * (p.end_s - p.begin_s),
        }
        for p in passes
    ]
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": stage, "args": {"name": f"stage {stage}"}}
        for stage in sorted({p.stage for p in passes})
    ]
    path.write_text(json.dumps({"traceEvents": names + events}))


def draw(passes: Sequence[Computed], title: str, path: Path) -> None:
    """Draw one row for each stage, with a rectangle for each pass and its number of tokens.

    The suffix of `path` chooses the format.
    """
    origin_s = passes[0].begin_s
    num_stages = 1 + max(p.stage for p in passes)
    figure = Figure(figsize=(11, 0.8 + 0.55 * num_stages), layout="constrained")
    axes = figure.subplots()
    starts = sorted({p.start for p in passes})
    for p in passes:
        color = ("#4878a8", "#8fb3d6")[starts.index(p.start) % 2]
        axes.barh(p.stage, p.end_s - p.begin_s, left=p.begin_s - origin_s, color=color, edgecolor="white")
        middle_s = (p.begin_s + p.end_s) / 2 - origin_s
        axes.text(middle_s, p.stage, str(p.num_tokens), ha="center", va="center", size=6)
    axes.set_yticks(range(num_stages), [f"stage {stage}" for stage in range(num_stages)])
    axes.invert_yaxis()
    axes.set_xlabel("seconds; numbers are tokens")
    axes.set_title(title, size=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)
