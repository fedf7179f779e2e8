"""Which hosts an image URL may reach: public addresses, or the hosts that the operator lists."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public(text: str) -> bool:
    """Whether an address that the resolver returned is one that anybody may reach.

    Addresses that carry an IPv4 address inside (mapped, NAT64, 6to4, Teredo) are judged by that one.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if getattr(address, "scope_id", None) is not None:
        return False  # an address with a zone is one of this machine's links
    return all(_is_public(part) for part in _embedded(address))


def _embedded(address: Address) -> Iterable[Address]:
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return (address.ipv4_mapped,)
        if address in _NAT64:
            return (ipaddress.IPv4Address(int(address) & 0xFFFFFFFF),)
        if address.sixtofour is not None:
            return (address, address.sixtofour)
        if address.teredo is not None:
            return (address, *address.teredo)
    return (address,)


def _is_public(address: Address) -> bool:
    special = (
        address.is_multicast or address.is_reserved or address.is_loopback or address.is_link_local
        or address.is_unspecified or address.is_private
    )  # fmt: skip
    if isinstance(address, ipaddress.IPv6Address) and address not in _GLOBAL_UNICAST:
        return False
    return address.is_global and not special


def host_key(host: str) -> str:
    """One spelling of a host name for comparison: lower case, no trailing dot, no brackets."""
    return host.strip().lower().rstrip(".").removeprefix("[").removesuffix("]")
