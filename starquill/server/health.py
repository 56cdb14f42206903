"""`/health`: whether requests are worked on."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request

from starquill.server.errors import ApiError

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(http: Request) -> dict[str, str]:
    """200 while the engine works, else 503; needs no key."""
    if not http.app.state.alive():
        raise ApiError(503, "the engine has ended; start the server again")
    return {"status": "ok"}
