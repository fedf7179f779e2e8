"""Which addresses are public, in every form in which an address can be hidden in another."""

from __future__ import annotations

import pytest

from gllm.media.address import host_key, is_public


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.8.8", "0.0.0.0", "0.1.2.3", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1",
        "169.254.169.254", "100.64.0.1", "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::",
        "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "fec0::1", "::ffff:127.0.0.1",
        "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::1", "2002:7f00:1::", "2002:a00:1::1", "2002:a9fe:a9fe::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2",
        "2001:db8::1", "100::1", "3fff:ffff:ffff:ffff:ffff:ffff:ffff:ffff%1", "", "localhost", "2130706433",
    ],
)  # fmt: skip
def test_private_addresses(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "93.184.215.14", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_public_addresses(address: str) -> None:
    assert is_public(address)


def test_one_spelling_of_a_host() -> None:
    assert {host_key(host) for host in ("Example.COM", "example.com.", " example.com ")} == {"example.com"}
    assert host_key("[::1]") == "::1"
