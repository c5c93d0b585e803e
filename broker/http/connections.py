"""Connections of aiohttp's servers, of which nothing lives on when they have ended, and that log no faults of clients.

aiohttp leaves what it has parsed and not answered, and errors with the calls that raised them, which all refer to the
connection: they live until Python searches for cycles. A request that is answered, and whose body still comes, is
waited for although its client is gone.
"""

import logging
from functools import partial
from typing import Any, cast

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

_GONE = ("Connection closed.",)  # what aiohttp raises when a client leaves while the rest of its request is awaited


def _is_ours(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    is_malformed = isinstance(error, HttpProcessingError)
    return not (is_malformed or (isinstance(error, RuntimeError) and error.args == _GONE))


FAULTS = logging.getLogger("aiohttp.server.faults")
FAULTS.addFilter(_is_ours)


class HttpConnection(RequestHandler):
    """A connection of aiohttp's. Its answers to requests that cannot be read may differ from aiohttp's own."""

    content: StreamReader | None = None  # the body of the last request

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._request_factory = cast(Any, partial(_request, self._request_factory))

    def connection_lost(self, exc: BaseException | None) -> None:
        is_answered = self._current_request is None
        super().connection_lost(exc)
        if self.content is not None and is_answered:
            self.content.feed_eof()
        self.content = None
        for message, _ in self._messages:
            if isinstance(error := getattr(message, "exc", None), BaseException):
                error.with_traceback(None)
        self._messages.clear()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        try:
            return self.error_answer(request, status, exc, message)
        finally:
            if exc is not None:
                exc.with_traceback(None)  # it refers to what read the request, and so to itself

    def error_answer(
        self, request: web.BaseRequest, status: int, exc: BaseException | None, message: str | None
    ) -> web.StreamResponse:
        """The answer to a request that cannot be read, or whose handler has failed."""
        return super().handle_error(request, status, exc, message)


def _request(make: Any, message: Any, content: StreamReader, connection: HttpConnection, *others: Any) -> Any:
    connection.content = content
    return make(message, content, connection, *others)


class HttpServer(web.Server):
    """aiohttp's server with our connections; `options` are those of the connections."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, logger=FAULTS, **options)

    def __call__(self) -> HttpConnection:
        return HttpConnection(self, loop=self._loop, **self._kwargs)
