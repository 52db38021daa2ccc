"""Which addresses media may be fetched from.

Beside vLLM's ``--allowed-media-domains``, which is checked at every redirect, a name is
only as good as the addresses it resolves to: unless the operator says otherwise, those of
private networks, of this host and of cloud metadata services are refused. Domains that
the operator lists are trusted with private addresses.

vLLM names relied on: exceptions.VLLMUnprocessableEntityError (answered as 422).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from urllib.request import getproxies

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from vllm.exceptions import VLLMUnprocessableEntityError
from yarl import URL

_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class MediaUnavailable(VLLMUnprocessableEntityError):
    """Media could not or may not be fetched; the text says why."""


class UrlPolicy:
    """Says no before a connection is made."""

    def __init__(self, allowed_domains: Collection[str], allow_private: bool) -> None:
        """``allowed_domains``: host names in lower case; none: all."""
        self._allowed = frozenset(allowed_domains)
        self._allow_private = allow_private
        # Their addresses are the operator's business. Behind a proxy, names are resolved
        # by it, and only what the address itself says can be checked here.
        proxies = {URL(address).host or "" for address in getproxies().values()}
        self._proxies = frozenset(proxies - {""})

    def check(self, url: URL) -> None:
        """Check what an address says by itself.

        Raises:
            MediaUnavailable: it must not be asked for anything.
        """
        if url.scheme not in ("http", "https") or not url.host:
            raise MediaUnavailable("The URL must be either a HTTP, data or file URL.")
        if self._allowed and url.host not in self._allowed:
            raise MediaUnavailable(
                f"The URL must be from one of the allowed domains: {sorted(self._allowed)}. "
                f"Input URL domain: {url.host}"
            )
        if self._trusts(url.host):
            return
        if url.host in self._proxies:
            raise _refused(url.host)
        try:
            address = ipaddress.ip_address(url.host)
        except ValueError:
            return  # a name: see permit
        if not _is_public(address):
            raise _refused(url.host)

    def permit(self, host: str, found: list[ResolveResult]) -> list[ResolveResult]:
        """Those addresses of a name that may be connected to.

        Raises:
            MediaUnavailable: none of them.
        """
        if self._trusts(host) or host in self._proxies:
            return found
        public = [r for r in found if _is_public(ipaddress.ip_address(r["host"]))]
        if not public:
            raise _refused(host)
        return public

    def _trusts(self, host: str) -> bool:
        return self._allow_private or host in self._allowed


class PolicedResolver(AbstractResolver):
    """Finds only permitted addresses. What it returns is what is connected to."""

    def __init__(self, policy: UrlPolicy, resolver: AbstractResolver | None = None) -> None:
        self._policy = policy
        self._resolver = resolver or ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return self._policy.permit(host, await self._resolver.resolve(host, port, family))

    async def close(self) -> None:
        await self._resolver.close()


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        # IPv4 addresses in another dress.
        if (inner := address.ipv4_mapped or address.sixtofour) is not None:
            return _is_public(inner)
        if address in _NAT64:
            return _is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return address.is_global and not address.is_multicast


def _refused(host: str) -> MediaUnavailable:
    return MediaUnavailable(
        f"Media may not be fetched from {host}: it is not a public address. The operator "
        "can list it in --allowed-media-domains or set --mm-url-private-addresses=allow."
    )
