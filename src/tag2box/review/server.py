"""The web server of the review page: local, guarded by a token, and able to send the photos of one label set only."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qs

import uvicorn
from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response

from tag2box.errors import UserError
from tag2box.labels.journal import Outdated
from tag2box.labels.review_order import Order, PhotoFilter
from tag2box.labels.reviews import Impossible
from tag2box.review.session import RenderingSize, ReviewSession

HOST = "127.0.0.1"
STATIC = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_MOST_BODY = 4 << 20
_DECODERS = 2
_T = TypeVar("_T")
_Message = MutableMapping[str, Any]
_Send = Callable[[_Message], Awaitable[None]]
_Receive = Callable[[], Awaitable[_Message]]
_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_CLOSED = "This page belongs to a review that is running: open the address that `tag2box review` printed.\n"


# ---------------------------------------------------------------- who may ask


@dataclass
class Access:
    """Who may talk to the server: browsers that were given its token, under its own address."""

    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    once: set[str] = field(default_factory=set)  # codes that open the page a single time

    @property
    def cookie(self) -> str:
        """Name of the cookie; browsers do not separate cookies by port."""
        return f"tag2box-review-{self.port}"

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self.port}/?token={self.token}"

    def address_once(self) -> str:
        """An address that works a single time, for the command line of a browser, which other users can see."""
        code = secrets.token_urlsafe(24)
        self.once.add(code)
        return f"http://{HOST}:{self.port}/?once={code}"

    def refusal(self, method: str, headers: Mapping[str, str]) -> int | None:
        """The status with which a request is refused; None if it may pass."""
        hosts = {f"{name}:{self.port}" for name in (HOST, "localhost")}
        if headers.get("host", "").lower() not in hosts:
            return 421  # a name that leads here by another site's DNS
        if headers.get("origin", "").removeprefix("http://") not in {"", *hosts}:
            return 403
        if method not in {"GET", "HEAD"} and not headers.get("content-type", "").startswith("application/json"):
            return 415  # what a form of another site cannot send
        return None if self._is_token(self._cookie_of(headers)) or self._is_token(headers.get("x-token", "")) else 403

    def opens(self, query: str) -> bool:
        """Whether the address of the page has the token, or a code that was not used yet."""
        fields = parse_qs(query)
        code = fields.get("once", [""])[0]
        if code in self.once:
            self.once.discard(code)
            return True
        return self._is_token(fields.get("token", [""])[0])

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(errors="replace"), self.token.encode())

    def _cookie_of(self, headers: Mapping[str, str]) -> str:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return ""
        return found.value if found is not None else ""


class Guard:
    """Passes on requests that ``Access`` allows, and adds the headers that confine the page."""

    def __init__(self, app: Any, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            return  # neither websockets nor events of the lifespan are used
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        status = self._access.refusal(scope["method"], headers)
        is_opened = False
        if status == 403 and scope["path"] == "/" and "origin" not in headers:
            is_opened = self._access.opens(scope["query_string"].decode("latin-1"))
        if status is not None and not is_opened:
            await Response(_CLOSED, status, _HEADERS, "text/plain")(scope, receive, send)
            return
        await self._app(scope, receive, partial(self._sent, send, is_opened))

    async def _sent(self, send: _Send, is_opened: bool, message: _Message) -> None:
        if message["type"] == "http.response.start":
            more = dict(_HEADERS)
            if is_opened:
                cookie = f"{self._access.cookie}={self._access.token}; Path=/; HttpOnly; SameSite=Strict"
                more["set-cookie"] = cookie
            pairs = [(name.encode(), value.encode()) for name, value in more.items()]
            message = {**message, "headers": [*message["headers"], *pairs]}
        await send(message)


# ---------------------------------------------------------------- what is answered


def create_app(session: ReviewSession, access: Access) -> Guard:
    """The application: the page, and what it asks for."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    decoders, writer = ThreadPoolExecutor(_DECODERS), ThreadPoolExecutor(1)
    _add_pages(app)
    _add_queries(app, session, writer)
    _add_photos(app, session, decoders)
    _add_actions(app, session, writer)

    @app.exception_handler(UserError)
    async def problem(_: Request, error: UserError) -> Response:
        return _json({"problem": str(error)}, 503)

    return Guard(app, access)


async def _in(pool: ThreadPoolExecutor, work: Callable[[], _T]) -> _T:
    return await asyncio.get_running_loop().run_in_executor(pool, work)


def _add_pages(app: FastAPI) -> None:
    files = {path.name: path.read_bytes() for path in STATIC.iterdir() if path.suffix in _TYPES}

    def answer(name: str) -> Response:
        kind = _TYPES.get(Path(name).suffix, "text/plain")
        if name not in files:
            return JSONResponse({"problem": "no such page"}, 404)
        return Response(files[name], 200, {"cache-control": "no-cache"}, kind)

    @app.get("/")
    async def page() -> Response:
        return answer("index.html")

    @app.get("/static/{name}")
    async def static(name: str) -> Response:
        return answer(name)


def _add_queries(app: FastAPI, session: ReviewSession, writer: ThreadPoolExecutor) -> None:
    @app.get("/api/set")
    async def label_set() -> Response:
        return _json(session.describe())

    @app.get("/api/files")
    async def files() -> Response:
        return _json([photo.file for photo in session.photos])

    @app.get("/api/queue")
    async def queue(
        order: Order | None = None,
        name: str | None = None,
        low: Annotated[float, Query(ge=0, le=1)] = 0.0,
        high: Annotated[float, Query(ge=0, le=1)] = 1.0,
    ) -> Response:
        return _json(await _in(writer, lambda: session.queue(order or session.order, PhotoFilter(name, low, high))))

    @app.get("/api/progress")
    async def progress(since: int = 0) -> Response:
        return _json(await _in(writer, lambda: session.progress(since)))


def _add_photos(app: FastAPI, session: ReviewSession, decoders: ThreadPoolExecutor) -> None:
    @app.get("/api/photos/{number}")
    async def photo(number: int) -> Response:
        return _json(session.photo(number)) if 0 <= number < len(session) else _no_photo(number)

    @app.get("/api/photos/{number}/{size}.jpg")
    async def rendering(number: int, size: RenderingSize, request: Request) -> Response:
        if not 0 <= number < len(session):
            return _no_photo(number)
        try:
            headers = {"etag": f'"{session.rendering_tag(number, size)}"', "cache-control": "private, no-cache"}
            if request.headers.get("if-none-match") == headers["etag"]:
                return Response(status_code=304, headers=headers)
            return Response(await _in(decoders, lambda: session.rendering(number, size)), 200, headers, "image/jpeg")
        except UserError as error:
            return _json({"problem": str(error)}, 410)


def _add_actions(app: FastAPI, session: ReviewSession, writer: ThreadPoolExecutor) -> None:
    @app.post("/api/photos/{number}/actions")
    async def act(number: int, request: Request) -> Response:
        if not 0 <= number < len(session):
            return _no_photo(number)
        try:
            sent = await _body(request)
            return _json(await _in(writer, lambda: session.act(number, sent)))
        except Outdated as error:
            return _json({"problem": str(error), "photo": session.photo(number)}, 409)
        except Impossible as error:
            return _json({"problem": str(error)}, 400)
        except UserError as error:  # the disk, or the journal: the page keeps the action and tries again
            return _json({"problem": str(error)}, 503)


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object that was sent."""
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > _MOST_BODY:
            raise Impossible("the action is too large")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Impossible("expected a JSON object")
    return value


def _json(value: object, status: int = 200) -> Response:
    return Response(json.dumps(value), status, {"cache-control": "no-store"}, "application/json")


def _no_photo(number: int) -> Response:
    return _json({"problem": f"there is no photo {number}"}, 404)


# ---------------------------------------------------------------- running it


def bind_port(port: int) -> socket.socket:
    """A socket of this machine alone; port 0 is any free one."""
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((HOST, port))
        found.listen(128)
    except (OSError, OverflowError) as error:
        found.close()
        why = getattr(error, "strerror", None) or error
        raise UserError(f"--port {port}: cannot be used ({why}); name another, or 0 for a free one") from None
    return found


def serve(session: ReviewSession, bound: socket.socket, access: Access) -> None:
    """Answer requests until Ctrl-C or SIGTERM."""
    config = uvicorn.Config(
        create_app(session, access),
        http="h11",
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    with contextlib.suppress(KeyboardInterrupt):  # the server has ended, and passes the signal on
        uvicorn.Server(config).run(sockets=[bound])
