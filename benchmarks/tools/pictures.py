"""Pictures that benchmarks and simulations share: distributions of TTFT and TBT, and goodput by rate.

Owns: matplotlib figures, axes in milliseconds, curves that stay visible where they are equal. Does not know:
how figures were measured, files.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEAST_MS = 0.01
_MOST_POINTS = 1000
_NARROWEST, _STEP, _WIDEST = 1.5, 2.0, 6.0
_NUM_LEGEND_COLUMNS = 2


class Latencies(NamedTuple):
    """The latencies of one run in seconds. Requests without a latency count in `num_requests` only."""

    label: str
    ttft_s: Sequence[float]
    tbt_s: Sequence[float]
    num_requests: int


def latencies_figure(
    runs: Sequence[Latencies], ttft_slo_s: float | None, tbt_slo_s: float | None
) -> "Figure":
    """Draw CDFs of TTFT and TBT.

    Shares are of all requests, so with rejected or failed requests a curve ends below 1.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, name, slo_s in ((panels[0], "ttft_s", ttft_slo_s), (panels[1], "tbt_s", tbt_slo_s)):
        shown_ms = [] if slo_s is None else [1000 * slo_s]
        for run, width in zip(runs, _widths(len(runs)), strict=True):
            ordered_ms = 1000 * np.sort(np.asarray(getattr(run, name), float))
            num_points = min(len(ordered_ms), _MOST_POINTS)
            points = np.linspace(0, max(0, len(ordered_ms) - 1), num_points).astype(int)
            shares = (points + 1) / max(1, run.num_requests)
            panel.step(ordered_ms[points], shares, where="post", label=run.label, linewidth=width)
            shown_ms += [*ordered_ms[:1], *ordered_ms[-1:]]
        if slo_s is not None:
            panel.axvline(1000 * slo_s, color="grey", linestyle=":", label="SLO")
        panel.set(xlabel=f"{name.removesuffix('_s').upper()}, ms", xscale="log", ylim=(0, 1.02))
        _label_in_ms(panel, shown_ms)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("share of requests")
    _legend_below(figure, panels[0])
    return figure


def goodput_figure(curves: Mapping[str, Iterable[tuple[float, float]]]) -> "Figure":
    """Draw goodput against the rate of arrivals, both in requests a second.

    There is one curve for each name in `curves`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    points = {name: sorted(of_curve) for name, of_curve in curves.items()}
    most = max((offered for of_curve in points.values() for offered, _ in of_curve), default=1.0)
    widths = _widths(len(points))
    axes.plot([0, most], [0, most], color="lightgrey", linewidth=max(widths) + 4, label="all requests")
    for (name, of_curve), width in zip(points.items(), widths, strict=True):
        axes.plot(*zip(*of_curve, strict=True), marker="o", linewidth=width, markersize=width + 4, label=name)
    axes.set(xlabel="arrivals, req/s", ylabel="goodput, req/s", xlim=(0, None), ylim=(0, None))
    axes.grid(alpha=0.3)
    _legend_below(figure, axes)
    return figure


class Bars(NamedTuple):
    """One panel of `bars_figure`. `by_side` has the values of each side, one value for each group."""

    title: str
    by_side: Mapping[str, Sequence[float]]
    limit: float | None
    """The value at which a line is drawn; None for no line."""


def bars_figure(groups: Sequence[str], panels: Sequence[Bars]) -> "Figure":
    """Draw panels beside one another. Groups are rows, in which each side has a horizontal bar."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.5 * len(panels) + 2, 0.9 * len(groups) + 1), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for panel, bars in zip(axes, panels, strict=True):
        height = 0.8 / len(bars.by_side)
        for number, (name, values) in enumerate(bars.by_side.items()):
            places = [group + number * height - 0.4 + height / 2 for group in range(len(groups))]
            panel.barh(places, values, height, label=name)
        if bars.limit is not None:
            panel.axvline(bars.limit, color="grey", linestyle=":")
        panel.set_title(bars.title, fontsize="medium")
        panel.set_yticks(range(len(groups)), groups)
        panel.grid(alpha=0.3, axis="x")
    axes[0].invert_yaxis()
    _legend_below(figure, axes[0])
    return figure


def _widths(num_curves: int) -> list[float]:
    """Return a width for each curve, each narrower than the one drawn before it, so that none is hidden."""
    step = min(_STEP, _WIDEST / max(1, num_curves - 1))
    return [_NARROWEST + step * below for below in reversed(range(num_curves))]


def _label_in_ms(axes: "Axes", shown_ms: Sequence[float]) -> None:
    """Label the axis at 1, 2 and 5 times powers of ten, from below the least value to above the largest."""
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    if not shown_ms:
        return
    least, most = max(_LEAST_MS, min(shown_ms)), max(_LEAST_MS, *shown_ms)
    decades = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    ticks = [first * 10.0**decade for decade in decades for first in (1, 2, 5)]
    low = max(tick for tick in ticks if tick <= least)
    high = min((tick for tick in ticks if tick > most), default=ticks[-1])
    shown = [tick for tick in ticks if low <= tick <= high]
    if len(shown) > 10:
        shown = [tick for tick in shown if math.log10(tick).is_integer() or tick in (low, high)]
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))


def _legend_below(figure: "Figure", axes: "Axes") -> None:
    """Draw a legend that hides no curve."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=_NUM_LEGEND_COLUMNS, fontsize="small")
