"""Errors that a client sees, with the HTTP status and the fields of OpenAI's error body."""

from __future__ import annotations


class RequestError(Exception):
    """A request that cannot be served. `param` names the offending field, `code` is a short machine-readable word."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, dict[str, str | None]]:
        """OpenAI's error body."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class BadRequest(RequestError):
    """The request itself is wrong: sending it again cannot help."""


class Overloaded(RequestError):
    """The server is full, or lost what it needed for this request: the same request may succeed later."""

    status = 503
    type = "service_unavailable"


class StartupError(RuntimeError):
    """The engine could not start; the message is one line that says what to change."""
