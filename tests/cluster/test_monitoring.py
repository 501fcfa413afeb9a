"""What people who look after a cluster see of it: Prometheus, Grafana's queries, the page at /dashboard."""

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.browser import Browser
from tests.cluster.harness import HTTP, ROOT, Server, eventually
from tests.cluster.slowed import SlowedServer
from tests.cluster.tiny_cluster import TRANSFERS, tiny_server
from tests.deadline import DEADLINE_S
from tests.debian import fetched
from tests.ports import free_port

pytestmark = pytest.mark.cluster
DASHBOARDS = sorted((ROOT / "docker/grafana/dashboards").glob("*.json"))
PROMETHEUS = ROOT / "docker/prometheus"
UNCHANGED_BUT_LOST_ONCE = """((fetch, numAsked) => async (path, options) => {
  if (!path.includes("requests/")) return fetch(path, options);
  numAsked += 1;
  if (numAsked === 2) throw new Error("it is lost");
  if (options.headers["if-none-match"]) return new Response(null, { status: 304 });
  const moments = [{ at_s: 0, step: "queued" }];
  return Response.json({ id: "one that waits", moments }, { headers: { etag: "same" } });
})(window.fetch, 0)"""
"""the answers to a page that shows a request"""


class Monitored:
    """A cluster with SLOs, an instance listener and clients that never stop asking, some of them in vain."""

    def __init__(self, server: Server, metrics_port: int) -> None:
        self.server, self.metrics_port = server, metrics_port
        self._client = httpx.Client(base_url=server.url, timeout=DEADLINE_S)
        self._stop = threading.Event()
        self._number = 0

    def _ask(self) -> None:
        self._number += 1
        shared = [5 + token % 90 for token in range(40)]
        own = [5 + (self._number * 7 + token) % 90 for token in range(24)]
        body = {
            "model": "tiny",
            "prompt": shared + own,
            "max_tokens": 6,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = self._client.post("/v1/completions", json=body)
        assert answer.status_code in (200, 429), answer.text
        if answer.status_code == 429:
            self._stop.wait(0.2)

    def run(self) -> None:
        with ThreadPoolExecutor(4) as clients:
            while not self._stop.is_set():
                for asked in [clients.submit(self._ask) for _ in range(4)]:
                    asked.result()

    def __enter__(self) -> "Monitored":
        self._thread = threading.Thread(target=self.run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()


@pytest.fixture(scope="module")
def monitored(tiny: Path) -> Iterator[Monitored]:
    port = free_port()
    with (
        tempfile.TemporaryDirectory(prefix="mc-") as run_dir,
        tiny_server(
            tiny,
            Path(run_dir),
            TRANSFERS,
            *("--conductor-ttft-slo-s=5", "--conductor-tbt-slo-s=1", "--conductor-max-running-requests=2"),
            *("--worker-metrics-listen", f"127.0.0.1:{port}"),
            kind=SlowedServer,
        ) as server,
        Monitored(server, port) as monitored,
    ):
        yield monitored


class Prometheus:
    """Asks a running one."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def get(self, path: str, **parameters: str) -> Any:
        found = self._client.get(path, params=parameters).json()
        assert found["status"] == "success", found
        return found["data"]

    def query(self, expression: str) -> Any:
        return self.get("query", query=expression)["result"]


def queries() -> list[tuple[str, str, str]]:
    """Dashboard, panel and expression of every query, with a range that a short test has."""
    return [
        (path.stem, panel["title"], target["expr"].replace("$__rate_interval", "10s"))
        for path in DASHBOARDS
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    ]


@pytest.fixture
def prometheus(monitored: Monitored, tmp_path: Path) -> Iterator[Prometheus]:
    """A real one that scrapes the cluster as docker/ has it, only more often."""
    program = fetched("prometheus", "usr/bin/prometheus")
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(PROMETHEUS / "alerts.yml")]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{monitored.server.port}"]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            program,
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address={address}",
            "--log.level=error",
        ]
    )
    try:
        eventually(lambda: is_ready(f"http://{address}/-/ready"), "Prometheus is ready", DEADLINE_S)
        with httpx.Client(base_url=f"http://{address}/api/v1", timeout=DEADLINE_S) as client:
            yield Prometheus(client)
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def is_ready(url: str) -> bool:
    try:
        return HTTP.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_every_panel_shows_something_of_a_real_cluster(prometheus: Prometheus) -> None:
    missing = queries()
    assert len(missing) > 40
    end_s = time.monotonic() + DEADLINE_S
    while missing:
        assert time.monotonic() < end_s, f"no data: {missing}"
        missing = [query for query in missing if not prometheus.query(query[2])]
        time.sleep(0.2)
    (group,) = prometheus.get("rules")["groups"]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    assert prometheus.query('ALERTS{alertstate="firing",severity="page"}') == []


def test_alerts_are_as_their_own_tests_say() -> None:
    tool = fetched("prometheus", "usr/bin/promtool")
    done = subprocess.run(
        [tool, "test", "rules", "alerts_test.yml"],
        cwd=PROMETHEUS,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tested = (PROMETHEUS / "alerts_test.yml").read_text()
    (group,) = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    assert [rule["alert"] for rule in group["rules"] if f'"{rule["alert"]}"' not in tested] == []


def test_the_exposition_is_what_prometheus_wants(monitored: Monitored) -> None:
    tool = fetched("prometheus", "usr/bin/promtool")
    for port in (monitored.server.port, monitored.metrics_port, monitored.metrics_port + 1):
        text = HTTP.get(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S).text
        done = subprocess.run(
            [tool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=DEADLINE_S
        )
        complaints = [line for line in done.stderr.splitlines() if not line.startswith("vllm:")]
        assert complaints == []


def text_at(url: str) -> str:
    return HTTP.get(f"{url}/metrics", timeout=DEADLINE_S).text


def test_each_instance_answers_for_itself(monitored: Monitored) -> None:
    for number, name in enumerate(("prefill-0", "decode-0")):
        url = f"http://127.0.0.1:{monitored.metrics_port + number}"
        assert HTTP.get(f"{url}/ready", timeout=DEADLINE_S).status_code == 200
        own = f'mooncake_instance_device_pages{{instance="{name}"}}'
        eventually(lambda own=own, url=url: own in text_at(url), "its first heartbeat")
        text, other = text_at(url), {"prefill-0": "decode-0", "decode-0": "prefill-0"}[name]
        assert f'instance="{other}"' not in text


def test_a_person_finds_a_request_and_its_steps_on_the_page(monitored: Monitored, tmp_path: Path) -> None:
    with Browser(tmp_path) as browser:
        browser.open(f"{monitored.server.url}/dashboard")
        browser.wait(lambda: browser.text("#connection") == "live", "that it is live")
        browser.wait(lambda: "decode-0" in browser.text("#instances tbody"), "the instances")
        bars = "document.querySelectorAll('#strips rect.prefill, #strips rect.decode').length"
        browser.wait(lambda: browser.evaluate(bars) == 2, "their roles over time")
        browser.wait(lambda: "prefill-0" in browser.text("#paths tbody"), "traffic")
        browser.wait(lambda: "429" in browser.text("#rejections tbody"), "rejections")
        assert "max_running_requests" in browser.text("#rejections tbody")
        book = {"name": "book", "prompt": [5 + token for token in range(40)]}
        url = f"{monitored.server.url}/v1/context_caches"
        eventually(
            lambda: HTTP.post(url, json=book, timeout=DEADLINE_S).is_success, "room for a context cache"
        )
        browser.wait(lambda: "cache-" in browser.text("#contexts tbody"), "a context cache")
        rows = "[...document.querySelectorAll('#requests tr')]"
        # That of the context cache has one token, which prefill draws: it is not decoded.
        others = f"{rows}.filter(row => !row.innerText.includes('cache-'))"
        finished = f"{others}.find(row => row.innerText.includes('finished'))"
        browser.wait(lambda: bool(browser.evaluate(f"Boolean({finished})")), "a finished request")
        request_id = browser.evaluate(f"{finished}.querySelector('.id').innerText")
        browser.click("#find input")
        browser.type(request_id)
        browser.click("#find button")
        browser.wait(lambda: request_id in browser.text("#timeline"), "the timeline")
        timeline = browser.text("#timeline")
        for step in ("queued", "reserving", "prefilling", "transferring", "loading", "decoding", "finished"):
            assert step in timeline
        assert "64 prompt tokens" in timeline
        if (picture := os.environ.get("MOONCAKE_SCREENSHOT")) is not None:
            browser.evaluate("scrollTo(0, 0)")
            browser.screenshot(Path(picture))
        browser.click("#requests tbody tr:nth-child(3)")
        browser.wait(lambda: request_id not in browser.text("#timeline"), "another timeline")
        assert browser.problems == []
        browser.click("#find input")
        browser.type("nobody's")
        browser.click("#find button")
        browser.wait(lambda: "no such request" in browser.text("#timeline"), "that there is no such request")
        browser.evaluate(f"window.fetch = {UNCHANGED_BUT_LOST_ONCE}")
        browser.wait(lambda: "it is lost" in browser.text("#timeline"), "what went wrong")
        browser.wait(lambda: "that waits" in browser.text("#timeline"), "the timeline again")


def test_what_the_page_has_already_is_not_sent_again(monitored: Monitored) -> None:
    with httpx.Client(base_url=monitored.server.url, timeout=DEADLINE_S) as client:
        for path in ("", "/app.js", "/app.css"):
            known = client.get(f"/dashboard{path}").headers["etag"]
            again = client.get(f"/dashboard{path}", headers={"if-none-match": known})
            assert (again.status_code, again.content) == (304, b"")
