"""The pages for browsers: `/`, and the API's description at `/docs`.

At `/`, programs other than browsers get JSON. Nothing is loaded from other hosts, as Swagger UI comes with a
package.

Owns: these pages. Does not know: what the routes do, which key they need.
"""

from html import escape
from importlib.metadata import version
from importlib.resources import files

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Match

_LINKS = {
    "docs": "/docs",
    "openapi": "/openapi.json",
    "models": "/v1/models",
    "health": "/health",
    "ready": "/ready",
    "metrics": "/metrics",
    "dashboard": "/dashboard",
}
_ASSETS = "/docs/assets"
_MEDIA_TYPES = {
    "favicon.png": "image/png",
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
}
"""The files of Swagger UI, with their media types.

The files are kept in memory, so that a client that reads nothing holds no file open.
"""
_HEADERS = {
    # Swagger UI is begun by a script within its page, and has styles and pictures of its own.
    "content-security-policy": "default-src 'self'; script-src 'self' 'unsafe-inline';"
    " style-src 'self' 'unsafe-inline'; img-src 'self' data:",
    "x-content-type-options": "nosniff",
}
_WITHOUT_INTERNET = {"validatorUrl": None}
"""Parameters that keep Swagger UI from sending the API's description to a validation server of its makers."""


def add_pages(app: FastAPI, model_name: str) -> None:
    """Add the pages for browsers.

    To be called after the other routes, as the pages link only paths that are served.
    """
    for name, media_type in _MEDIA_TYPES.items():
        content = files("fastapi_offline").joinpath("static", name).read_bytes()
        _add_asset(app, f"{_ASSETS}/{name}", content, media_type)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        # Relative, for servers behind a proxy that gives them a folder.
        page = get_swagger_ui_html(
            openapi_url="openapi.json",
            title=f"{app.title}: API",
            swagger_js_url=f".{_ASSETS}/swagger-ui-bundle.js",
            swagger_css_url=f".{_ASSETS}/swagger-ui.css",
            swagger_favicon_url=f".{_ASSETS}/favicon.png",
            swagger_ui_parameters=_WITHOUT_INTERNET,
        )
        page.headers.update(_HEADERS)
        return page

    links = {name: path for name, path in _LINKS.items() if _is_served(app, path)}
    facts = {"name": app.title, "version": version("mooncake-serve"), "model": model_name}
    html = _page(facts, links)

    @app.get("/", include_in_schema=False)
    async def start(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(html, headers={**_HEADERS, "vary": "accept"})
        return JSONResponse({**facts, "links": links}, headers={"vary": "accept"})


def _add_asset(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    @app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)
    async def asset() -> Response:
        return Response(content, media_type=media_type, headers={"cache-control": "max-age=3600"})


def _is_served(app: FastAPI, path: str) -> bool:
    scope = {"type": "http", "method": "GET", "path": path, "root_path": "", "headers": []}
    return any(route.matches(scope)[0] is Match.FULL for route in app.routes)


def _page(facts: dict[str, str], links: dict[str, str]) -> str:
    items = "".join(f'<li><a href=".{path}">{name}</a></li>' for name, path in links.items())
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{facts['name']}</title>"
        "<style>body { font: 16px/1.5 system-ui; margin: 3em auto; max-width: 40em; padding: 0 1em }</style>"
        f"<h1>{facts['name']} {facts['version']}</h1>"
        f"<p>Serves {escape(facts['model'])}. The API is OpenAI's, at <code>/v1</code>.</p><ul>{items}</ul>"
    )
