"""The document that the API gives of itself."""

from pathlib import Path
from typing import Any

import httpx

from mooncake.security.api_keys import add_api_key
from tests.conductor.front.fakes import Running, byte_model, running_front
from tests.deadline import DEADLINE_S


def references(value: Any) -> set[str]:
    if isinstance(value, list):
        return {found for item in value for found in references(item)}
    if not isinstance(value, dict):
        return set()
    here = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
    return here.union(*(references(item) for item in value.values()))


def test_every_reference_leads_somewhere(front: Running) -> None:
    document = httpx.get(f"{front.url}/openapi.json", timeout=DEADLINE_S).json()
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    found = references(document)
    assert {"#/components/schemas/Message", "#/components/schemas/Error"} <= found
    assert found <= known
    assert "security" not in document["paths"]["/v1/models"]["get"]


def test_what_needs_a_key_says_so(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    key = add_api_key(keys, "alice", {})
    with running_front(tmp_path, byte_model(), api_keys_file=keys) as front:
        headers = {"authorization": f"Bearer {key}"}
        document = httpx.get(f"{front.url}/openapi.json", headers=headers, timeout=DEADLINE_S).json()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert document["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]
    assert "security" not in document["paths"]["/ready"]["get"]


def test_admin_routes_that_alone_need_a_key_say_so(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    add_api_key(keys, "operator", {})
    with running_front(tmp_path, byte_model(), admin_keys_file=keys) as front:
        document = httpx.get(f"{front.url}/openapi.json", timeout=DEADLINE_S).json()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert document["paths"]["/admin/instances"]["get"]["security"] == [{"key": []}]
    assert "security" not in document["paths"]["/v1/models"]["get"]
