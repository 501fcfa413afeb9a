"""The generator of the chart's schema: `python docker/helm/generate.py` writes values.schema.json.

The written file is checked in. The schema is that in schema.yaml, extended by the configuration keys of
mooncake-serve. Keys that the chart sets itself are left out.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from mooncake.config.settings import Config, leaf_keys

FOLDER = Path(__file__).parent
SCHEMA = FOLDER / "mooncake-serve/values.schema.json"
OF_THE_CHART = {
    *("role", "instance", "num_prefill", "num_decode", "num_both"),
    *("http.host", "http.port", "http.admin_listen", "http.api_keys_file", "http.admin_keys_file"),
    *("http.tls_cert", "http.tls_key"),
    *("conductor.endpoint", "conductor.reply_endpoint", "conductor.state_file"),
    *("kvcache.ssd_dirs", "kvcache.ssd_bytes"),
    *("worker.device", "worker.metrics_listen", "worker.drain_timeout_s"),  # the device is the image's
    *("messenger.hosts", "messenger.port", "cluster", "security"),
    *("pipeline.stage", "pipeline.endpoints", "pipeline.listen_endpoint"),
}
"""Configuration keys and sections that the chart sets, so that the value `config` must not have them."""


def rendered() -> str:
    """Return the text of the schema's file."""
    schema = yaml.safe_load((FOLDER / "schema.yaml").read_text())
    keys = Config.model_json_schema(ref_template="#/$defs/{model}")
    definitions = keys.pop("$defs")
    sections = {
        path[0]: definitions[keys["properties"][path[0]]["$ref"].rpartition("/")[2]]["properties"]
        for path in leaf_keys()
        if len(path) > 1
    }
    for path in OF_THE_CHART:
        section, _, key = path.partition(".")
        del (sections[section] if key else keys["properties"])[key or section]
    schema["$defs"] |= {"config": keys, **definitions}
    return json.dumps(_without_titles(schema), indent=1) + "\n"


def _without_titles(node: Any) -> Any:
    """Return a schema without its titles, defaults and formats, because Helm does not use them."""
    if isinstance(node, list):
        return [_without_titles(each) for each in node]
    if not isinstance(node, dict):
        return node
    is_schema = "type" in node or "anyOf" in node or "$ref" in node or "enum" in node
    dropped = {"title", "default", "format"} if is_schema else set()
    return {key: _without_titles(value) for key, value in node.items() if key not in dropped}


if __name__ == "__main__":
    SCHEMA.write_text(rendered())
