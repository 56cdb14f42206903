"""Errors in OpenAI's form: one object, one line, the field where one is at fault."""

from __future__ import annotations

from fastapi.responses import JSONResponse

from starquill.errors import BadRequestError, BusyError, CapacityError, StarquillError

RETRY_AFTER_SECONDS = 1


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

    def response(self) -> JSONResponse:
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if self.status == 503 else None
        return JSONResponse(self.body(), self.status, headers)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error from behind the routes."""
    match error:
        case ApiError():
            return error
        case BusyError():
            return ApiError(503, str(error))
        case BadRequestError() | CapacityError():
            return ApiError(400, str(error))
        case StarquillError():
            return ApiError(400, str(error))
    return ApiError(500, f"a fault in starquill ({type(error).__name__}); its log has more")
