"""The page at `/`: an editor that shows what the model would write. Plain files, nothing built."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

from starquill.server.errors import ApiError

ASSETS = Path(__file__).parent / "assets"
MEDIA_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
# Completions are other people's text: whatever they hold, the browser asks this server alone.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # the next version's page is shown at once
}
# A browser cannot send a key before it has the page that asks for one.
PATHS = frozenset({"/", *(f"/page/{name}" for name in MEDIA_TYPES)})

router = APIRouter(include_in_schema=False)


@cache
def _content(name: str) -> bytes:
    return (ASSETS / name).read_bytes()


@router.api_route("/", methods=["GET", "HEAD"])
def index() -> Response:
    return file("index.html")


@router.api_route("/page/{name}", methods=["GET", "HEAD"])
def file(name: str) -> Response:
    """One of the page's files; the list is fixed, so no path can lead elsewhere."""
    if name not in MEDIA_TYPES:
        known = ", ".join(MEDIA_TYPES)
        return ApiError(404, f"the page has no file {name!r:.60} (it has {known})").response()
    return Response(_content(name), media_type=MEDIA_TYPES[name], headers=HEADERS)
