"""The page and its state, for this machine and whoever has the token.

Other pages in the same browser can reach 127.0.0.1 too, and a name can be made to point there: so every request needs the token, a Host
that is ours, and, where the browser says from which page it comes, an Origin that is ours. Orders need that Origin.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from moeyard.errors import MoeyardError
from moeyard.live.state import run_state

Order = Callable[[dict[str, Any]], str]  # what is asked -> what was done
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_MOST_BYTES = 4096  # of an order


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise MoeyardError(f"no module {error.name}: pip install 'moeyard[live]'") from error


class Server:
    """Listens from the moment it is made; `address` has the token in it."""

    def __init__(self, folder: Path, port: int = 0, order: Order | None = None) -> None:
        _library("starlette")
        _library("uvicorn")
        self.folder, self.order = folder, order
        self.token = secrets.token_urlsafe(24)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(("127.0.0.1", port))
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            raise MoeyardError(
                f"port {port} on 127.0.0.1: {error.strerror}; take another, or 0 for any"
            ) from error
        self.port = int(self._socket.getsockname()[1])
        self.hosts = (f"127.0.0.1:{self.port}", f"localhost:{self.port}")
        self._server: Any = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/?token={self.token}"

    def serve(self) -> None:
        """Until `stop`, or Ctrl-C."""
        uvicorn = _library("uvicorn")
        config = uvicorn.Config(self.app(), log_level="error", access_log=False, server_header=False)
        self._server = uvicorn.Server(config)
        with self._socket:
            self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        if self._server is None:
            self._socket.close()
        else:
            self._server.should_exit = True

    def app(self) -> Any:
        applications, routing = _library("starlette.applications"), _library("starlette.routing")
        routes = [
            routing.Route("/", self._page, methods=["GET"]),
            routing.Route("/state.json", self._state, methods=["GET"]),
        ]
        if self.order is not None:
            routes.append(routing.Route("/order", self._order, methods=["POST"]))
        return applications.Starlette(
            routes=routes, exception_handlers={404: self._elsewhere, 405: self._elsewhere}
        )

    def allowed(self, headers: Any, token: str, *, orders: bool = False) -> bool:
        """Whether a request may be answered."""
        origin = headers.get("origin")
        ours = [f"http://{host}" for host in self.hosts]
        if headers.get("host") not in self.hosts or (origin not in ours and (orders or origin is not None)):
            return False
        return secrets.compare_digest(token.encode(), self.token.encode())

    async def _elsewhere(self, request: Any, error: Any) -> Any:
        """What there is, and how it is asked for, is not told to who has no token."""
        header = request.headers.get("x-token", "")
        if not self.allowed(request.headers, request.query_params.get("token", header)):
            return self._answer("403: no token, or from elsewhere", 403)
        return self._answer(f"{error.status_code}: {error.detail}", error.status_code)

    async def _page(self, request: Any) -> Any:
        if not self.allowed(request.headers, request.query_params.get("token", "")):
            return self._answer("403: no token, or from elsewhere", 403)
        html = files("moeyard.live").joinpath("page.html").read_text(encoding="utf-8")
        return self._answer(html.replace("TAKES_ORDERS", "true" if self.order else "false"), kind="text/html")

    async def _state(self, request: Any) -> Any:
        if not self.allowed(request.headers, request.query_params.get("token", "")):
            return self._answer("403: no token, or from elsewhere", 403)
        return self._answer(json.dumps(run_state(self.folder)), kind="application/json")

    async def _order(self, request: Any) -> Any:
        if not self.allowed(request.headers, request.headers.get("x-token", ""), orders=True):
            return self._answer("403: no token, or from elsewhere", 403)
        assert self.order is not None
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _MOST_BYTES:
                return self._answer("413: too long", 413)
        try:
            asked = json.loads(body)
            beside = _library("starlette.concurrency").run_in_threadpool  # a lab may take its time to answer
            done = await beside(self.order, asked if isinstance(asked, dict) else {})
        except (ValueError, RecursionError, MoeyardError) as error:
            return self._answer(f"400: {error}", 400)
        return self._answer(json.dumps({"done": done}), kind="application/json")

    def _answer(self, text: str, status: int = 200, kind: str = "text/plain") -> Any:
        responses = _library("starlette.responses")
        return responses.Response(text, status_code=status, media_type=kind, headers=_HEADERS)
