"""/health, /ready and /metrics, on the daemon's listener and on `metrics.port`, which has its own thread and event loop
so that API traffic does not delay it. The routes only read and are thread-safe.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from dataclasses import asdict, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp

from ...metrics.observer import Observer
from .connections import ServerOptions
from .server import make_server
from .state import Services

STALLED_S = 60.0
"""If the daemon's event loop has not run for this long, /health is 503: it will not recover by itself."""
_CONNECTIONS, _GIVES_WAY_S = 64, 0.1


def readiness(services: Services) -> tuple[bool, dict[str, Any]]:
    """Whether requests are answered now, and the body of /ready."""
    dispatcher, store = services.dispatcher, services.store
    states = dispatcher.states
    reasons = [state.reason for state in states if state.phase != "ready" and state.reason]
    # a full disk refuses batches alone: it must not take a daemon that answers out of a balancer
    failure = store.stalled or (None if store.full else store.failure) or services.encoder.failure
    if failure:
        reasons.insert(0, failure)
    fine = dispatcher.ready and not failure
    replicas = [
        {
            "phase": state.phase,
            "reason": state.reason,
            "restarts": state.restarts,
            **asdict(state.culprit),
            "standby": state.standby or "none",
        }
        for state in states
    ]
    if dispatcher.draining:
        reasons = ["the daemon drains: requests in flight are finished, new ones are refused, then it stops"]
    return fine, {
        "status": "ready" if fine else "draining" if dispatcher.draining else "not_ready",
        "reason": "" if fine else "; ".join(reasons) or "the engine is starting",
        "replicas": replicas,
        "batches": services.batches.gate.why or "running",
    }


def probes_router(services: Services) -> APIRouter:
    """Liveness and readiness. Neither needs a key; without one the answer has only a status."""
    router = APIRouter(tags=["operations"])

    @router.get("/health", responses={503: {}})
    @router.get("/ping", responses={503: {}})
    @router.post("/ping", responses={503: {}})
    async def health() -> Response:
        """Whether this process lives, and its loop turns. Needs no key."""
        still = time.monotonic() - services.samples.looked
        return JSONResponse(
            {"status": "alive"} if still < STALLED_S else {"status": "stalled"}, 200 if still < STALLED_S else 503
        )

    @router.get("/ready", responses={503: {}})
    async def ready(request: Request) -> Response:
        """Whether requests are answered now: 503 from the moment a rank is suspect, the store cannot be written, no
        text worker can be started, or the daemon drains. Needs no key; without one (where keys are set) it says the
        status alone."""
        fine, body = readiness(services)
        if not request.state.known:
            body = {"status": body["status"]}
        return JSONResponse(body, 200 if fine else 503, headers={} if fine else {"retry-after": "5"})

    return router


def metrics_router(observer: Observer) -> APIRouter:
    """The route that Prometheus scrapes, on the daemon's listener or on the separate one."""
    router = APIRouter(tags=["operations"])

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics(request: Request) -> Response:
        """Every series, for Prometheus. Where keys are set it takes one of the kind metrics."""
        body, kind = observer.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": kind})

    return router


class ProbeListener:
    """Serves `app` on `listener`, on its own thread, until `close`."""

    def __init__(self, app: ASGIApp, listener: socket.socket, options: ServerOptions) -> None:
        few = replace(options, max_connections=_CONNECTIONS, max_per_address=_CONNECTIONS, gives_way=_GIVES_WAY_S)
        self._server = make_server(app, few)
        self._thread = threading.Thread(target=self._run, args=(listener,), name="probes", daemon=True)
        self._thread.start()

    def _run(self, listener: socket.socket) -> None:
        asyncio.run(self._server.serve(sockets=[listener]))

    async def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        await asyncio.to_thread(self._thread.join)
