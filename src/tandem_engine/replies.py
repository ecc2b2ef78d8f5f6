"""How HTTP replies are written: JSON by msgspec, and errors in one shape.

For: `http.py`, `bootstrap.py` and `openai.py`; `HANDLERS` answers what a route raises.
Not for: what a generation replies (`generate.py`, `openai.py`).
"""

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

CLIENT_LEFT = 499
encode = msgspec.json.Encoder().encode


class RequestError(Exception):
    """A request that cannot be served; `status` is the HTTP status of the reply."""

    def __init__(self, message: str, status: int = 400) -> None:
        """One sentence for the client."""
        super().__init__(message)
        self.message = message
        self.status = status


def json_reply(value: object, status: int = 200) -> Response:
    """A JSON reply."""
    return Response(encode(value), status_code=status, media_type="application/json")


def error_body(status: int, message: str) -> dict[str, object]:
    """The error object of SGLang's OpenAI routes, used on every route here."""
    kind = "BadRequestError" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "InternalServerError"
    return {
        "object": "error",
        "error": {"message": message, "type": kind, "param": None, "code": status},
        "message": message,
        "type": kind,
        "code": status,
    }


def error(status: int, message: str) -> Response:
    """An error reply: a JSON body whatever the route."""
    return json_reply(error_body(status, message), status)


# All of them coroutines: for anything else Starlette starts a thread.


async def _request_error(_http: Request, problem: RequestError) -> Response:
    return error(problem.status, problem.message)


async def _http_error(_http: Request, problem: HTTPException) -> Response:
    return error(problem.status_code, problem.detail)


async def _decode_error(_http: Request, problem: msgspec.MsgspecError) -> Response:
    return error(400, f"the body does not fit this route: {problem}")


async def _too_deep(_http: Request, _problem: RecursionError) -> Response:
    return error(400, "the body is nested too deeply")


async def _left(_http: Request, _problem: ClientDisconnect) -> Response:
    """Nobody reads this: a client that leaves in the middle of its body is no error of ours."""
    return Response(status_code=CLIENT_LEFT)


async def _bug(_http: Request, problem: Exception) -> Response:
    # uvicorn logs it with its stack.
    return error(500, f"internal error: {type(problem).__name__}")


HANDLERS: Final[Mapping[Any, Callable[..., Any]]] = {
    RequestError: _request_error,
    HTTPException: _http_error,
    msgspec.MsgspecError: _decode_error,
    RecursionError: _too_deep,
    ClientDisconnect: _left,
    Exception: _bug,
}
"""What an application answers when a route raises: JSON, whatever it was."""
