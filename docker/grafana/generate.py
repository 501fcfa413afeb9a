"""A generator of Grafana's dashboards: `python docker/grafana/generate.py` writes dashboards/*.json.

The written files are checked in. A panel is an entry of the tables below: title, unit, and its queries with
their legends.
"""

import json
from pathlib import Path
from string import ascii_uppercase
from typing import NamedTuple

from grafana_foundation_sdk.builders import dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import VisibilityMode
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DashboardLinkType, DataSourceRef

FOLDER = Path(__file__).parent / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
RATE = "[$__rate_interval]"
WIDTH, HEIGHT = 8, 8
"""The size of a panel in Grafana's grid. Three panels are in a row."""


class Chart(NamedTuple):
    """One panel. `queries` maps PromQL expressions to legends, which are Grafana templates."""

    title: str
    unit: str
    queries: dict[str, str]
    description: str = ""


def quantiles(histogram: str) -> dict[str, str]:
    return {
        f"histogram_quantile({q}, sum by (le) (rate({histogram}_bucket{RATE})))": f"p{int(q * 100)}"
        for q in (0.5, 0.9, 0.99)
    }


def rates(counter: str, *labels: str, where: str = "") -> dict[str, str]:
    """Return the query for the increase of a counter per second, summed by labels, and its legend."""
    legend = " ".join(f"{{{{{label}}}}}" for label in labels)
    return {f"sum by ({', '.join(labels)}) (rate({counter}{where}{RATE}))": legend}


def moved(gauge: str) -> str:
    """Return the query for a gauge of modules that are at helpers, by instance and helper."""
    return f"sum by (instance, helper) ({gauge})"


OVERVIEW = [
    Chart(
        "Requests by their end",
        "reqps",
        rates("mooncake_requests_total", "outcome"),
        "HTTP requests; aborted: the client hung up.",
    ),
    Chart(
        "Goodput",
        "reqps",
        {
            f'rate(mooncake_requests_within_slo_total{{slo="both"}}{RATE})': "within both SLOs",
            f"sum(rate(vllm:request_success_total{RATE}))": "finished",
        },
        "Choices that finished, and those of them whose TTFT and TBT were within the SLOs.",
    ),
    Chart("Rejections by reason", "reqps", rates("mooncake_rejections_total", "reason")),
    Chart(
        "Time to first token",
        "s",
        {**quantiles("mooncake_time_to_first_token_seconds"), 'mooncake_slo_seconds{slo="ttft"}': "SLO"},
    ),
    Chart(
        "TBT of requests",
        "s",
        {**quantiles("mooncake_request_tbt_seconds"), 'mooncake_slo_seconds{slo="tbt"}': "SLO"},
        "Of a request: the mean of its longest 10% of gaps.",
    ),
    Chart("Gaps between tokens", "s", quantiles("mooncake_token_gap_seconds")),
    Chart(
        "Placements",
        "reqps",
        rates("mooncake_placements_total", "prefix"),
        "By where the prefix that is reused comes from.",
    ),
    Chart(
        "Predicted and actual TTFT",
        "s",
        {
            f'sum by (kind) (rate(mooncake_predictions_seconds_total{{of="ttft"}}{RATE}))'
            f" / on () group_left () sum(rate(mooncake_ttft_prediction_error_seconds_count{RATE}))": (
                "{{kind}}"
            )
        },
        "Means, from placement on.",
    ),
    Chart("Error of the predicted TTFT", "s", quantiles("mooncake_ttft_prediction_error_seconds")),
    Chart("Requests by state", "short", {"mooncake_requests_by_state": "{{state}}"}),
    Chart(
        "Where requests spend their time",
        "s",
        {
            f"sum by (step) (rate(mooncake_request_step_seconds_total{RATE}))"
            f" / sum by (step) (rate(mooncake_request_steps_total{RATE}))": "{{step}}"
        },
        "Mean duration of each step.",
    ),
    Chart(
        "Tokens",
        "tokens/s",
        {
            f"rate(mooncake_generation_tokens_total{RATE})": "generated",
            f"rate(mooncake_prompt_tokens_total{RATE})": "of prompts",
            f"rate(mooncake_cached_prompt_tokens_total{RATE})": "of prompts, from the cache",
        },
    ),
    Chart(
        "Migrations by reason",
        "ops",
        rates("mooncake_migrations_total", "reason", where='{outcome="moved"}'),
        "Running requests that have moved to another decode instance.",
    ),
    Chart(
        "Migrations that came to nothing",
        "ops",
        rates("mooncake_migrations_total", "outcome", where='{outcome!="moved"}'),
        "The request stayed, or had ended.",
    ),
    Chart(
        "Time of a migration",
        "s",
        {
            f"rate(mooncake_migration_seconds_total{RATE})"
            f' / on () group_left () sum(rate(mooncake_migrations_total{{outcome="moved"}}{RATE}))': (
                "to the hand-over"
            )
        },
        "Mean. Meanwhile the source goes on decoding.",
    ),
]
KVCACHE = [
    Chart(
        "Share of prompt tokens that were reused",
        "percentunit",
        {
            f"rate(mooncake_cached_prompt_tokens_total{RATE})"
            f" / rate(mooncake_prompt_tokens_total{RATE})": "reused"
        },
    ),
    Chart("Prompt tokens by source", "tokens/s", rates("mooncake_prefill_tokens_total", "source")),
    Chart("Block hits by tier", "ops", rates("mooncake_pool_hits_total", "tier")),
    Chart("Block misses by reason", "ops", rates("mooncake_pool_misses_total", "reason")),
    Chart("Evictions", "ops", rates("mooncake_pool_evictions_total", "tier", "policy")),
    Chart("Held", "bytes", {"sum by (tier) (mooncake_pool_held_bytes)": "{{tier}}"}),
    Chart("Pages of DRAM by state", "short", {"sum by (state) (mooncake_pool_pages)": "{{state}}"}),
    Chart("Blocks by what happened to them", "ops", rates("mooncake_pool_blocks_total", "event")),
    Chart(
        "Blocks of context caches", "short", {"sum by (state) (mooncake_context_cache_blocks)": "{{state}}"}
    ),
    Chart(
        "Tokens saved by context caches",
        "tokens/s",
        {
            f"sum by (key) (rate(mooncake_context_cache_saved_tokens_total{RATE})) or vector(0)": "{{key}}",
        },
    ),
    Chart(
        "What must not be",
        "short",
        {
            "sum(mooncake_pool_orphaned_pages)": "orphaned pages",
            "sum(mooncake_pool_damaged_total)": "damaged blocks",
            "sum(mooncake_pool_errors_total)": "failed reads and writes",
            "count(mooncake_pool_tier_healthy == 0) or vector(0)": "unhealthy tiers",
        },
    ),
]
TRANSFER = [
    Chart("Sent", "Bps", rates("mooncake_transfer_bytes_total", "transport", where='{direction="sent"}')),
    Chart(
        "Received", "Bps", rates("mooncake_transfer_bytes_total", "transport", where='{direction="received"}')
    ),
    Chart("In flight", "bytes", {"sum by (instance) (mooncake_transfer_in_flight_bytes)": "{{instance}}"}),
    Chart(
        "Busiest pairs",
        "Bps",
        {
            "topk(10, sum by (instance, peer, transport, direction)"
            f" (rate(mooncake_transfer_peer_bytes_total{RATE})))": (
                "{{instance}} {{direction}} {{peer}} {{transport}}"
            )
        },
        "Told by the instance that asked for the transfer.",
    ),
    Chart(
        "Slowest pairs while in use",
        "Bps",
        {
            "bottomk(10, sum by (instance, peer, transport)"
            f" (rate(mooncake_transfer_peer_bytes_total{RATE})) / sum by (instance, peer, transport)"
            f" (rate(mooncake_transfer_peer_seconds_total{RATE})))": "{{instance}} {{peer}} {{transport}}"
        },
        "Bytes divided by the time in which some were in flight.",
    ),
    Chart("Open connections", "short", {"sum by (instance) (mooncake_transfer_streams)": "{{instance}}"}),
]
INSTANCES = [
    Chart("Registered", "short", {"mooncake_instances": "{{role}}"}),
    Chart("Roles", "short", {"mooncake_instance_role == 1": "{{instance}} {{role}}"}),
    Chart(
        "Draining and switching",
        "short",
        {'sum by (state) (mooncake_instance_state{state!="serving"})': "{{state}}"},
    ),
    Chart("Switches of roles", "ops", rates("mooncake_role_switches_total", "outcome")),
    Chart("Running", "short", {'mooncake_instance_requests{state="running"}': "{{instance}}"}),
    Chart("Waiting", "short", {'mooncake_instance_requests{state="waiting"}': "{{instance}}"}),
    Chart("Assigned prompt tokens", "short", {"mooncake_instance_assigned_tokens": "{{instance}}"}),
    Chart("Device KVCache in use", "percentunit", {"vllm:kv_cache_usage_perc": "{{engine}}"}),
    Chart(
        "DRAM pool in use",
        "percentunit",
        {
            'sum by (instance) (mooncake_pool_pages{state!="free"})'
            " / sum by (instance) (mooncake_pool_pages)": "{{instance}}"
        },
    ),
    Chart("Decoded tokens", "tokens/s", rates("mooncake_decode_tokens_total", "instance")),
    Chart(
        "Mean decode iteration",
        "s",
        {
            f'rate(mooncake_decode_seconds_total{{part="forward"}}{RATE})'
            f" / ignoring(part) rate(mooncake_decode_iterations_total{RATE})": "{{instance}}"
        },
    ),
    Chart(
        "Preemptions and refusals",
        "ops",
        {
            f"sum by (instance) (rate(mooncake_decode_preemptions_total{RATE}))": "{{instance}} preempted",
            f"sum by (instance) (rate(mooncake_decode_refusals_total{RATE}))": "{{instance}} refused",
        },
    ),
    Chart(
        "KV heads and layers at helpers",
        "short",
        {
            moved("mooncake_instance_moved_heads"): "KV heads of {{instance}} at {{helper}}",
            moved("mooncake_instance_moved_layers"): "layers of {{instance}} at {{helper}}",
        },
        "An instance that has all of them itself has a line at 0, without a helper.",
    ),
    Chart(
        "Sequences at helpers",
        "percentunit",
        {moved("mooncake_instance_moved_sequence_ratio"): "{{instance}} at {{helper}}"},
        "The share of each long sequence whose KVCache is to be at a helper. An instance that has all of it"
        " itself has a line at 0, without a helper.",
    ),
    Chart(
        "Moves of KV heads, layers and sequences",
        "ops",
        rates("mooncake_module_moves_total", "instance", "outcome"),
        "slow: taken back, as iterations took longer with the helper; lost: the helper has ended.",
    ),
    Chart(
        "Pauses of decoding for these moves",
        "s",
        {
            **quantiles("mooncake_module_pause_seconds"),
            f"sum(rate(mooncake_module_pause_seconds_sum{RATE}))"
            f" / sum(rate(mooncake_module_pause_seconds_count{RATE}))": "mean",
        },
    ),
]
DASHBOARDS = {
    "overview": ("mooncake-serve: overview", OVERVIEW),
    "kvcache": ("mooncake-serve: KVCache", KVCACHE),
    "transfer": ("mooncake-serve: transfer", TRANSFER),
    "instances": ("mooncake-serve: instances", INSTANCES),
}


def panel(chart: Chart) -> timeseries.Panel:
    built = (
        timeseries.Panel()
        .title(chart.title)
        .description(chart.description)
        .unit(chart.unit)
        .min(0)
        .fill_opacity(8)
        .show_points(VisibilityMode.NEVER)
        .datasource(SOURCE)
        .span(WIDTH)
        .height(HEIGHT)
    )
    for ref_id, (expression, legend) in zip(ascii_uppercase, chart.queries.items(), strict=False):
        built.with_target(prometheus.Dataquery().ref_id(ref_id).expr(expression).legend_format(legend))
    return built


def rendered(name: str) -> str:
    """Return the JSON of one dashboard."""
    title, charts = DASHBOARDS[name]
    built = (
        dashboard.Dashboard(title)
        .uid(f"mooncake-{name}")
        .tags(["mooncake-serve"])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .link(
            dashboard.DashboardLink("mooncake-serve")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["mooncake-serve"])
            .as_dropdown(True)
            .keep_time(True)
        )
    )
    for chart in charts:
        built.with_panel(panel(chart))
    return json.dumps(built.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(rendered(name))
