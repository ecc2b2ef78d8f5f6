"""How HTTP replies are written: JSON by msgspec, and errors in one shape.

For: `http.py`, `bootstrap.py` and `openai.py`.
Not for: what a generation replies (`generate.py`, `openai.py`).
"""

from http import HTTPStatus

import msgspec
from starlette.responses import Response

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
