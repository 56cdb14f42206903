"""Errors in OpenAI's form: one object, one line, the field where one is at fault.

Ollama's routes have its own: `{"error": "text"}`.
"""

from __future__ import annotations

import reprlib

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from starquill.errors import (
    BadRequestError,
    BusyError,
    CapacityError,
    NumericsError,
    StageLostError,
    UnsupportedError,
    printable,
)

RETRY_AFTER_SECONDS = 1
CLIENT_LEFT = 499
MOST_TOLD = 3
MOST_SHOWN = 60
_short = reprlib.Repr()
_short.maxstring = _short.maxlong = _short.maxother = MOST_SHOWN


class ApiError(Exception):
    """An answer that is an error. `param` names the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param

    def body(self) -> dict[str, object]:
        kind = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        return {"error": error}

    def response(self, path: str = "") -> JSONResponse:
        """The answer, in the form of the API that `path` belongs to."""
        headers = {
            401: {"WWW-Authenticate": "Bearer"},
            503: {"Retry-After": str(RETRY_AFTER_SECONDS)},
        }.get(self.status)
        is_ollamas = path.startswith("/api/")
        body = {"error": self.message} if is_ollamas else self.body()
        return JSONResponse(body, self.status, headers)


def shown(value: object) -> str:
    """The beginning of what a client sent, however long that is."""
    return _short.repr(value)[:MOST_SHOWN]


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error from behind the routes."""
    match error:
        case ApiError():
            return error
        case BusyError() | StageLostError():
            return ApiError(503, str(error))
        case BadRequestError() | CapacityError() | UnsupportedError():
            return ApiError(400, str(error))
        case NumericsError():
            return ApiError(500, str(error))
        case RequestValidationError():
            return _of_validation(error)
        case HTTPException():
            return ApiError(error.status_code, str(error.detail))
    return ApiError(500, f"a fault in starquill ({type(error).__name__}); its log has more")


def _of_validation(error: RequestValidationError) -> ApiError:
    """The fields at fault, by their names in the request; `param` is the first of them."""
    told, first = [], None
    for problem in error.errors()[:MOST_TOLD]:
        place = ".".join(str(part) for part in problem["loc"][1:])
        if problem["type"] == "json_invalid":
            return ApiError(400, f"the body is not JSON: {problem['ctx']['error']}")
        if not place:
            return ApiError(
                400,
                "the body is not a JSON object (expected one, as Content-Type application/json)",
            )
        first = first or place.split(".")[0]
        reason = problem.get("ctx", {}).get("error") or problem["msg"]
        found = "" if problem["type"] == "missing" else f" (it is {shown(problem['input'])})"
        told.append(printable(f"{place}: {reason}{found}"))
    return ApiError(400, "; ".join(told), first)
