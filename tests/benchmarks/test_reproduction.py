import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from benchmarks.reproduction.__main__ import EXPERIMENTS, main, run_all
from benchmarks.reproduction.experiment import Cell, Mean, Outcome, Table, Trace, mean_of
from benchmarks.reproduction.experiments.cache import pipeline
from benchmarks.reproduction.experiments.cache.formulas import needed_bytes_per_s
from benchmarks.reproduction.experiments.cache.workload import block_hits
from benchmarks.reproduction.experiments.disaggregation import inlining, interconnects
from benchmarks.reproduction.experiments.disaggregation.coupled import capacity_per_s
from benchmarks.reproduction.experiments.placement import banaserve, modules, scheduling
from benchmarks.reproduction.page import Run, write_page
from benchmarks.tools.simulator.cluster.machines.cards import HARDWARE, MODELS
from benchmarks.tools.simulator.cluster.requests import Outcome as Ended
from benchmarks.tools.simulator.cluster.requests import Results, SimulatedRequest
from benchmarks.tools.simulator.summary import SLOs
from benchmarks.tools.traces.request import TraceRequest
from conductor.performance.model import overlapped_s
from mooncake.cli.command_line import FAILED, WRONG_USE


def results_of(num_good: int, num_late: int) -> Results:
    results = Results()
    for number in range(num_good + num_late):
        request = SimulatedRequest(number, float(number), 1, 2, [])
        request.first_token_s = request.arrival_s + (1.0 if number < num_good else 9.0)
        results.end(request, Ended.FINISHED, request.first_token_s + 1.0)
    return results


def test_capacity_lies_where_too_many_are_late() -> None:
    slos = SLOs(ttft_s=2.0)
    sweep = [(1.0, results_of(100, 0)), (2.0, results_of(80, 20))]
    assert capacity_per_s(sweep, slos) == pytest.approx(1.5)
    assert capacity_per_s(sweep[:1], slos) == 1.0
    assert capacity_per_s([(1.0, results_of(60, 40))], slos) == pytest.approx(0.25)


def test_reuse_pays_from_the_published_bandwidths_on() -> None:
    model = MODELS["llama3-70b"]
    needed = [needed_bytes_per_s(model, HARDWARE[name], 8192) / 1e9 for name in ("a800", "h800")]
    assert needed == pytest.approx([6, 19], rel=0.03)


def test_transfers_by_layer_show_the_last_layer_or_what_the_link_does_not_carry() -> None:
    num_tokens, num_layers = 4096, 80
    compute_s = interconnects.prefill_s(num_tokens)
    produced_per_s = num_tokens * MODELS["llama2-70b"].kv_bytes_per_token / compute_s
    fast_s = interconnects.shown_s(num_tokens, 4 * produced_per_s)
    assert fast_s == pytest.approx(compute_s / 4 / num_layers)
    slow_s = interconnects.shown_s(num_tokens, produced_per_s / 4)
    assert slow_s == pytest.approx(compute_s / num_layers + 3 * compute_s)


def test_a_block_is_hit_by_each_request_after_the_first_one_that_has_it() -> None:
    blocks = [(1, 2), (1, 3), (1, 2, 4)]
    requests = [TraceRequest(0.0, 512 * len(ids), 1, ids) for ids in blocks]
    assert sorted(block_hits(requests)) == [0, 0, 1, 2]


def test_a_table_shows_three_digits_and_nothing_for_nothing() -> None:
    table = Table(["a", "b"], [["x", None], [1234.4, 0.12345]])
    assert table.markdown().splitlines()[2:] == ["| x |  |", "| 1,234 | 0.123 |"]


def test_means_have_a_confidence_interval_by_students_t_with_the_decimals_of_the_mean() -> None:
    found = mean_of([10.0, 12.0, 11.0, 13.0, 14.0])  # standard deviation: sqrt(2.5)
    assert found.mean == 12.0
    assert found.half_width == pytest.approx(2.776 * (2.5 / 5) ** 0.5)
    shown = {str(found), str(Mean(0.00549, 0.0002)), str(Mean(5949.0, 96.2)), str(Mean(0.0, 0.0))}
    assert shown == {"12.0 ± 2.0", "0.00549 ± 0.00020", "5,949 ± 96", "0 ± 0"}


def test_the_page_has_what_was_found_and_names_what_failed(tmp_path: Path) -> None:
    """`hit_rate` needs the trace, which is not there; the others do not."""
    chosen = [e for e in EXPERIMENTS if e.name in ("shapes", "hit_rate", "occupancy")]
    found = run_all(chosen, Trace(tmp_path / "none"), tmp_path, num_processes=1)
    assert sorted(found) == ["occupancy", "shapes"]
    page = tmp_path / "page.md"
    write_page(chosen, found, Run("none", "2026-01-31", "2 cores", 1, 60.0), tmp_path, page)
    lines = page.read_text().splitlines()
    assert "**Failed in this run: `hit_rate`.**" in lines
    assert [line for line in lines if "2026" in line] == [
        "Run on 2026-01-31 with `make reproduce TRACE=none`, on 2 cores: 1 minutes with 1 process."
    ]
    titles = [line for line in lines if line.startswith("## ")]
    assert titles[:2] == ["## Costs of prefill and decode", "## What a prompt's KVCache occupies"]


def test_an_experiment_that_fails_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["reproduction", str(tmp_path / "none"), "--results", str(tmp_path), "--processes", "1"]
    for only, code in (("shapes", 0), ("shapes,hit_rate", FAILED), ("shape", WRONG_USE)):
        monkeypatch.setattr(sys, "argv", [*command, "--only", only])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == code
    printed = capsys.readouterr()
    assert printed.out.count("## Costs of prefill and decode") == 2
    assert "hit_rate failed" in printed.err
    assert "no experiment is named shape;" in printed.err


def test_a_remark_says_what_the_figures_beside_it_say() -> None:
    def remark(ttft_s: dict[str, float]) -> str:
        rows: list[list[str | float | None]] = [[name, None, s, s, 0.5] for name, s in ttft_s.items()]
        header = ["policy", "published", "ours", "p90", "within"]
        return scheduling.policies_remark(Outcome([Table(header, rows)]))

    names = ["random", "load_balancing", "cache_aware", "kvcache_centric", "banaserve"]
    as_published = remark(dict(zip(names, (8.0, 4.0, 2.0, 1.0, 1.5), strict=True)))
    assert "The order is the published one: random takes 2.0 times" in as_published
    assert "1.50 times as long as the best, `kvcache_centric`" in as_published
    otherwise = remark(dict(zip(names, (8.0, 4.0, 1.0, 2.0, 0.5), strict=True)))
    assert "The order is not the published one" in otherwise
    assert "1.00 times as long as the best, `banaserve`" in otherwise


def test_skewed_prefixes_are_shared_the_more_the_earlier() -> None:
    first_ids = [request.hash_ids[0] for request in islice(banaserve.skewed(10.0), 2000)]
    uses = Counter(first_ids).most_common()
    assert uses[0][0] == 0
    assert uses[0][1] > 5 * uses[20][1]
    ends = {request.hash_ids[-1] for request in islice(banaserve.skewed(10.0), 2000)}
    assert len(ends) == 2000


def test_drawn_loads_offer_a_little_more_than_the_nodes_can_compute() -> None:
    loads = [inlining.drawn_load(seed) for seed in range(3)]
    assert len({load.first_input_tokens for load in loads}) == 3
    assert loads == [inlining.drawn_load(seed) for seed in range(3)]
    for load in loads:
        slow = msgspec.structs.replace(load, rate_per_s=1.0)
        assert load.rate_per_s == pytest.approx(1.1 * inlining.capacity_per_s(slow))


def test_what_is_chosen_is_compared_with_the_better_of_the_two() -> None:
    rows: list[list[str | float | None]] = [
        ["a", 1.0, 0.5, 0.8, 0.8, 1.0, 1.0, 0.5],
        ["b", 1.0, 0.8, 0.5, 0.72, 0.9, 1.1, 0.5],
    ]
    said = inlining.remark(Outcome([Table([], rows)]))
    assert "on 1 of 2 loads. The worst is b: 90.0% as many, with 110.0% as many prompt tokens" in said


def test_load_aware_routing_says_which_rule_has_the_least_ttft() -> None:
    rows: list[list[Cell]] = [
        [load, rule, mean_of([ttft_s] * 5), 1.0, 1.5, 0.5, 0.1]
        for load in ("skewed prefixes, 20 req/s", "conversation trace")
        for rule, ttft_s in zip(banaserve.POLICIES, (2.0, 4.0, 3.0, 1.0), strict=True)
    ]
    told = banaserve.remark(Outcome([Table([], rows)]))
    assert "0.75 and 0.75 times that of `fewest requests`; 3.00 and 3.00 times that of `Algorithm 1`" in told
    assert "The least has `Algorithm 1`." in told


def test_measured_pipelines_take_what_the_model_says_within_15_percent(tmp_path: Path) -> None:
    *_, shown = pipeline.run(Trace(tmp_path), tmp_path).tables
    for _, pipelined, measured, after, measured_after in shown.rows:
        assert measured == pytest.approx(pipelined, rel=0.15)
        assert measured_after == pytest.approx(after, rel=0.15)


def test_measured_fetches_over_slow_links_take_what_the_model_says_within_5_percent(tmp_path: Path) -> None:
    _, fetched, _ = pipeline.run(Trace(tmp_path), tmp_path).tables
    assert len(fetched.rows) == 6
    for *_, by_model, measured in fetched.rows:
        assert measured == pytest.approx(by_model, rel=0.05)


def test_a_transfer_hides_from_the_needed_bandwidth_on() -> None:
    num_layers, (model, hardware, num_gpus) = 32, pipeline.DEVICES[0]
    layer = pipeline.layer_of(model, hardware, num_gpus, 4096, 3072)
    compute_s, num_bytes = num_layers * layer.compute_s, num_layers * layer.fetched_bytes
    for factor, shown in ((2.0, 1 / (2 * num_layers)), (1.0, 1 / num_layers), (0.5, 1 + 1 / num_layers)):
        transfer_s = num_bytes / (factor * layer.needed_bytes_per_s)
        assert overlapped_s(compute_s, transfer_s, num_layers) == pytest.approx((1 + shown) * compute_s)


def test_opt_has_the_weights_that_its_name_says() -> None:
    assert MODELS["opt-13b"].weights_bytes / 2 == pytest.approx(13e9, rel=0.03)


@pytest.mark.parametrize(("model", "name"), modules.FIGURES)
def test_prompts_of_the_moved_modules_fit_their_model(model: str, name: str) -> None:
    load = modules.load_of(name, model)
    assert max(load.first_input_tokens) + modules.OUTPUT_TOKENS <= modules.CONTEXT_TOKENS[model]


def test_gains_above_what_all_devices_as_one_serve_are_named() -> None:
    gains = [
        [figure, most, 0.9, 1.3, most, 1.2, 1.9, "80%"]
        for figure, most in (("8", 1.2), ("9", 3.9), ("10", 1.3))
    ]
    assert "above that: 9; within it: 8, 10." in modules.remark(Outcome([Table([], gains)]))
