"""The dashboards that are checked in are those that their generator makes."""

import json
import re
import runpy
from pathlib import Path

import pytest

from mooncake.messages.instance_metrics import instance_text

FOLDER = Path(__file__).parent.parent / "docker/grafana"
GENERATOR = runpy.run_path(str(FOLDER / "generate.py"))
METRICS_OF = ("mooncake_", "vllm:")


@pytest.mark.parametrize("name", GENERATOR["DASHBOARDS"])
def test_dashboards_are_current(name: str) -> None:
    found = (FOLDER / f"dashboards/{name}.json").read_text()
    assert found == GENERATOR["rendered"](name), "run make generate"


def test_panels_do_not_overlap_and_say_what_they_show() -> None:
    for path in (FOLDER / "dashboards").glob("*.json"):
        taken: set[tuple[int, int]] = set()
        for panel in json.loads(path.read_text())["panels"]:
            assert panel["title"]
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken, f"{path.name}: {panel['title']}"
            assert max(x for x, _ in cells) < 24
            taken |= cells
            refs = [target["refId"] for target in panel["targets"]]
            assert len(set(refs)) == len(refs)
            assert all(re.search("|".join(METRICS_OF), target["expr"]) for target in panel["targets"])


def test_all_kinds_of_modules_at_helpers_are_shown() -> None:
    moved = set(re.findall("mooncake_instance_moved_[a-z_]+", instance_text([], "model")))
    assert moved == set(re.findall("mooncake_instance_moved_[a-z_]+", GENERATOR["rendered"]("instances")))


def test_lines_of_modules_name_the_instance_and_its_helper() -> None:
    targets = [
        target
        for panel in json.loads(GENERATOR["rendered"]("instances"))["panels"]
        for target in panel["targets"]
        if "mooncake_instance_moved_" in target["expr"]
    ]
    assert targets
    for target in targets:
        [by] = re.findall(r"sum by \(([a-z, ]+)\)", target["expr"])
        assert by == "instance, helper"
        assert re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]) == ["instance", "helper"]
