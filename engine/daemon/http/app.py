"""The HTTP application: routes, a common form of errors, the API's description. Without torch and MPI."""

from __future__ import annotations

import html
from collections.abc import Collection
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from ...openai.errors import ApiError
from ...openai.to_engine import wrong_model
from ..keys import KeyRing
from .batches import batches_router
from .errors import failed, response_of
from .files import files_router
from .generate import Direct, Generator, generate_router
from .guard import OPEN, Guard
from .page import page_router
from .probes import metrics_router, probes_router
from .responses import responses_router
from .state import Services
from .usage import usage_router
from .vllm import vllm_router

_TEXT, _TEXT_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}
_MEMBERS = {"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": [*_MEMBERS], "properties": _MEMBERS}},
}
_STATUSES = (400, 401, 403, 404, 405, 408, 409, 413, 415, 421, 429, 431, 500, 503, 504, 507)
_OTHER_KINDS = ("audio", "embeddings", "images", "moderations")
_CODES = {404: "not_found", 405: "method_not_allowed"}


def models_router(services: Services) -> APIRouter:
    router = APIRouter(tags=["models"])

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that is served here."""
        return {"object": "list", "data": [_model(services)]}

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """One model."""
        if (error := wrong_model(model, services.served_model_name)) is not None:
            raise error
        return _model(services)

    return router


def _model(services: Services) -> dict[str, Any]:
    limits = services.dispatcher.limits
    return {
        "id": services.served_model_name,
        "object": "model",
        "created": services.started_at,
        "owned_by": "laddertron",
        "max_model_len": None if limits is None else limits.max_model_len,
    }


def make_api(services: Services, generator: Generator, version: str, with_metrics: bool = True) -> FastAPI:
    app = FastAPI(title="laddertron", version=version, docs_url=None, redoc_url=None)
    own = (files_router(services), batches_router(services), generate_router(generator), responses_router(services))
    more = (models_router(services), page_router(services, version), probes_router(services), usage_router(services))
    for router in (*own, *more, vllm_router(services, version)):
        app.include_router(router)
    if with_metrics:
        app.include_router(metrics_router(services.observer))
    _handle_errors(app)

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page_of(app.openapi()))

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _described(get_openapi(title=app.title, version=app.version, routes=app.routes))
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]
    return app


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> JSONResponse:
        return response_of(error)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        status, path, headers = error.status_code, request.url.path[:200], error.headers or {}
        message = str(error.detail)
        if status == 404:
            kind = path.removeprefix("/v1/").lstrip("/").partition("/")[0]
            none = f"{kind} are not supported; " if kind in _OTHER_KINDS else ""
            routes = app.openapi()["paths"]
            at_v1 = any(route.startswith(f"/v1/{kind}") for route in routes) and kind and not path.startswith("/v1/")
            there = f"the API is at /v1: set the base URL to end in /v1 (/v1{path})" if at_v1 else ""
            message = f"no route {path!r}: {none}{there or 'there are ' + ', '.join(routes)}"
        elif status == 405:
            named = [given for route, given in app.openapi()["paths"].items() if compile_path(route)[0].match(path)]
            methods = {method.upper() for operations in named for method in operations}  # of several routes
            methods |= {"HEAD"} if "GET" in methods else set()
            headers = {**headers, "Allow": ", ".join(sorted(methods)) or headers.get("Allow", "GET")}
            message = f"{request.method} {path!r}: this route allows {headers['Allow']}"
        response = response_of(ApiError(message, _CODES.get(status), status=status))
        response.headers.update(headers)
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][1:])[:80]
        return response_of(ApiError(f"{name}: {first['msg']}", param=name))

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> JSONResponse:
        return response_of(failed())


def make_app(
    services: Services,
    version: str,
    keys: KeyRing | None,
    with_metrics: bool = True,
    local_names: Collection[str] | None = None,
) -> Guard:
    """Makes the daemon's application. `local_names`: see Guard."""
    generator = Generator(services)
    app = Direct(make_api(services, generator, version, with_metrics), generator)
    return Guard(app, services.limits, keys, services.observer, services.usage, local_names)


def make_probe_app(
    services: Services, version: str, keys: KeyRing | None, local_names: Collection[str] | None = None
) -> Guard:
    """Makes an application with only /health, /ready and /metrics, behind the same guard."""
    app = FastAPI(title="laddertron probes", version=version, docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(probes_router(services))
    app.include_router(metrics_router(services.observer))
    _handle_errors(app)
    return Guard(app, services.limits, keys, local_names=local_names)


def _described(schema: dict[str, Any]) -> dict[str, Any]:
    """Adds the actual errors and the API key to the schema."""
    components = schema.setdefault("components", {})
    components["schemas"] = {"Error": _ERROR}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{"key": []}]
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)
            for status in _STATUSES:
                if path in OPEN and status == 503:
                    responses["503"] = {"description": "not now", "content": {"application/json": {"schema": {}}}}
                else:
                    responses.setdefault(str(status), {"description": "error", "content": content})
            if path in OPEN:
                operation["security"] = []
    return schema


def page_of(schema: dict[str, Any]) -> str:
    """Renders the API's description as one page of HTML, without scripts or external resources."""
    rows = []
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            parameters = ", ".join(p["name"] for p in operation.get("parameters", []))
            cells = (method.upper(), path, operation.get("description") or operation.get("summary", ""), parameters)
            rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    title = html.escape(f"{schema['info']['title']} {schema['info']['version']}")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        "<style>body{font:16px sans-serif;margin:2em}td,th{text-align:left;padding:.3em 1em .3em 0}"
        "td:nth-child(-n+2){font-family:monospace}</style>"
        f"<h1>{title}</h1><p>The full description: <a href=/openapi.json>/openapi.json</a></p>"
        f"<table><tr><th>method<th>path<th>what it does<th>parameters</tr>{''.join(rows)}</table></html>"
    )
