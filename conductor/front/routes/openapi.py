"""The document at `GET /openapi.json`: the description of the routes' bodies and answers.

Owns: the document. Does not know: what routes do. Bodies are described by the pydantic models that parse
them.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from conductor.front.access.access import OPEN_PATHS
from conductor.front.access.admin_access import ADMIN_PREFIXES

_REFERENCE = "#/components/schemas/{model}"
_METHODS = frozenset({"get", "post", "delete"})
_STREAMED = frozenset({"/v1/chat/completions", "/v1/completions"})
_JSON = {"application/json": {"schema": {"type": "object"}}}
_NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
                "param": _NULLABLE,
                "code": _NULLABLE,
            },
        }
    },
}


def described(body: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a request body, for the argument `openapi_extra` of its route.

    This is needed because FastAPI describes only bodies that FastAPI itself parses.
    """
    schema = body.model_json_schema(ref_template=_REFERENCE)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, *, clients_need_key: bool, admins_need_key: bool) -> None:
    """Add the description of all routes to the application. To be called after the last route was added."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas: dict[str, Any] = {"Error": _ERROR}
    schemas |= {
        name: schema
        for name, schema in document.get("components", {}).get("schemas", {}).items()
        if "ValidationError" not in name  # FastAPI's own error bodies, which are answered as ours
    }
    for path, operations in document["paths"].items():
        for operation in (operations[method] for method in _METHODS & operations.keys()):
            if "requestBody" in operation:
                body = operation["requestBody"]["content"]["application/json"]["schema"]
                schemas |= body.pop("$defs", {})
            operation["responses"] = _responses(path)
            of_admins = path.startswith(ADMIN_PREFIXES)
            if admins_need_key if of_admins else clients_need_key and path not in OPEN_PATHS:
                operation["security"] = [{"key": []}]
    document["components"] = {"schemas": schemas}
    if clients_need_key or admins_need_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    app.openapi = lambda: document  # type: ignore[method-assign]


def _responses(path: str) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}} if path == "/metrics" else _JSON
    if path in _STREAMED:
        content = {**content, "text/event-stream": {}}  # a schema describes no events
    error = {"application/json": {"schema": {"$ref": _REFERENCE.format(model="Error")}}}
    return {
        "200": {"description": "the answer", "content": content},
        "default": {"description": "OpenAI's error body", "content": error},
    }
