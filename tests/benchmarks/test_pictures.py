"""Pictures say what was measured: arrivals as they were, times in ms, no curve behind another or a legend."""

import itertools
import re
from pathlib import Path

import pytest

from benchmarks.tools.load.measures import Slo, summarize
from benchmarks.tools.load.outcomes import Kind, Outcome, RunResult
from benchmarks.tools.load.pictures import draw, goodput_curves
from benchmarks.tools.load.report import Measured
from benchmarks.tools.pictures import Latencies, goodput_figure, latencies_figure

SLO = Slo(ttft_s=5.0, tbt_s=0.15, long_from=1024)


def a_run(server: str, asked_for_per_s: float, num_requests: int, sending_s: float) -> Measured:
    outcomes = [
        Outcome(number, Kind.FINISHED, 0.0, 10, 0.0, 1.0, 0.5, 0.02) for number in range(num_requests)
    ]
    summary = summarize(RunResult(outcomes, num_requests, sending_s, sending_s, [0.1]), SLO)
    return Measured(server, f"{asked_for_per_s:g} req/s", asked_for_per_s, summary)


def test_goodput_is_drawn_over_the_rate_of_arrivals() -> None:
    runs = [a_run("here", 4.0, 30, 10.0), a_run("here", 8.0, 90, 10.0), a_run("there", 4.0, 50, 10.0)]
    assert goodput_curves(runs) == {"here": [(3.0, 3.0), (9.0, 9.0)], "there": [(5.0, 5.0)]}
    [axes] = goodput_figure(goodput_curves(runs)).axes
    assert [list(line.get_xdata()) for line in axes.lines] == [[0, 9.0], [3.0, 9.0], [5.0]]


@pytest.mark.parametrize("num_curves", [2, 3, 8])
def test_equal_curves_stay_visible(num_curves: int) -> None:
    equal = [(1.0, 1.0), (2.0, 2.0)]
    goodput = goodput_figure({str(number): equal for number in range(num_curves)})
    latencies = latencies_figure(
        [Latencies(str(number), [0.1, 0.2], [0.01, 0.02], 2) for number in range(num_curves)], None, None
    )
    for axes in (*goodput.axes, *latencies.axes):
        widths = [line.get_linewidth() for line in axes.lines]
        assert all(over < under - 0.5 for under, over in itertools.pairwise(widths))


@pytest.mark.parametrize(
    ("ttft_s", "ticks"),
    [
        ([0.022, 0.048], ["20", "50"]),
        ([0.0034, 0.3], ["2", "5", "10", "20", "50", "100", "200", "500"]),
        ([0.5, 12.0], ["500", "1,000", "2,000", "5,000", "10,000", "20,000"]),
        ([0.001, 60.0], ["1", "10", "100", "1,000", "10,000", "100,000"]),
    ],
)
def test_times_have_ticks_in_ms_that_are_written_out(ttft_s: list[float], ticks: list[str]) -> None:
    figure = latencies_figure([Latencies("run", ttft_s, [0.01], 2)], None, None)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    assert axes.get_xlabel() == "TTFT, ms"
    assert [label.get_text() for label in axes.get_xticklabels()] == ticks
    low, high = axes.get_xlim()
    assert low <= 1000 * min(ttft_s)
    assert 1000 * max(ttft_s) <= high


def test_a_legend_covers_no_curve() -> None:
    labels = [f"http://127.0.0.1:800{number}, {number} req/s" for number in range(6)]
    latencies = latencies_figure([Latencies(label, [0.1], [0.01], 1) for label in labels], 5.0, 0.15)
    for figure in (latencies, goodput_figure({label: [(1.0, 1.0)] for label in labels})):
        figure.draw_without_rendering()
        [legend] = figure.legends
        assert not any(legend.get_window_extent().overlaps(axes.get_window_extent()) for axes in figure.axes)
        assert len(legend.get_texts()) == len(labels) + 1


def test_what_never_answered_is_drawn_nowhere(tmp_path: Path) -> None:
    failed = Outcome(0, Kind.FAILED, 0.0, 10, 0.0, 1.0)
    run = Measured("here", "1 req/s", 1.0, summarize(RunResult([failed], 1, 1.0, 1.0, [0.1]), SLO))
    [drawn] = draw([run], [[failed]], SLO, tmp_path)
    assert re.search("TTFT", drawn.read_text())
