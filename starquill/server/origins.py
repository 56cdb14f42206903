"""Which pages may ask. A browser sends a page's requests wherever the page says, with no key asked
for, and a page's owner can let the page's own name lead to this machine (DNS rebinding).
"""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from starquill.server.errors import ApiError, shown
from starquill.server.options import ServerOptions

LOCAL = "localhost"


def check_origin(headers: Headers, options: ServerOptions) -> None:
    """Refuse pages of other servers, and names that no loopback address has by itself."""
    if "*" in options.cors:
        return
    host, origin = headers.get("Host"), headers.get("Origin")
    if host is not None and options.hosts is not None and not _is_known(host, options):
        raise ApiError(
            403,
            f"the Host {shown(host)} is no loopback name (expected localhost or 127.0.0.1; "
            "give --cors with the address if it is yours)",
        )
    if origin is None or origin in options.cors:
        return
    if host is None or origin.partition("://")[2].lower() != host.lower():
        raise ApiError(
            403, f"pages of {shown(origin)} may not ask (start the server with --cors to let them)"
        )


def _is_known(host: str, options: ServerOptions) -> bool:
    if any(urlsplit(allowed).netloc == host.lower() for allowed in options.cors):
        return True
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:  # brackets with no address in them
        return False
    if name == LOCAL or name.endswith(f".{LOCAL}") or name in (options.hosts or ()):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
