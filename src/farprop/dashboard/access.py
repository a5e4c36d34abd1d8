"""Who may see the page: whoever has the token. And what the browser may do with the page: nothing but show it.

The token is in the address that is printed, so an address is enough to get in. From then on a cookie has it, which
scripts can't read and other sites can't use. A page of another site that has its name lead to this server (DNS
rebinding) is told apart by the name that the browser asked for.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_REFUSAL = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>farprop: {title}</title>
<h1>{heading}</h1>
<p>{advice}</p>
</html>
"""

NOT_ALLOWED = _REFUSAL.format(
    title="not allowed",
    heading="This page needs its token",
    advice="Open the whole address that <code>farprop dashboard</code> printed. It ends with <code>?token=</code> and "
    "the token. An address of an earlier run is no longer good.",
)

WRONG_HOST = _REFUSAL.format(
    title="wrong name",
    heading="This server is not known by that name",
    advice="Open the address that <code>farprop dashboard</code> printed. To use another name of this host, give it "
    "with <code>--host</code>.",
)


class Access:
    """Decides about requests.

    Args:
        host: the address or name that the server listens on.
    """

    def __init__(self, host: str) -> None:
        self.token = secrets.token_urlsafe(24)
        self._names = {"localhost"}
        address = _address(host)
        self.is_loopback = host == "localhost" if address is None else address.is_loopback
        if not self.is_loopback:
            self._names |= {host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}

    def is_known_host(self, header: str) -> bool:
        """Whether the ``Host`` of a request is a name of this server. The port may be that of a tunnel."""
        name = header.rpartition(":")[0] if header.rpartition(":")[2].isdigit() else header
        address = _address(name.removeprefix("[").removesuffix("]"))
        if address is not None:  # no name, so nobody could have it lead here
            return address.is_loopback or not self.is_loopback
        return name.lower() in self._names

    def is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self.token.encode())


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
