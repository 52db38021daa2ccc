"""Addresses of etcd as people write them."""

from __future__ import annotations

import pytest

from transfer.errors import TransferError
from transfer.etcd.address import own_address_towards, parse_etcd_address


def test_one_endpoint() -> None:
    address = parse_etcd_address("etcd://etcd.local:2379")
    assert address.urls == ["http://etcd.local:2379"]
    assert (address.user, address.password) == ("", "")


def test_several_endpoints_with_a_user_and_tls() -> None:
    address = parse_etcd_address("etcds://me:secret@10.0.0.1:2379,[fd00::1]:2379/")
    assert address.urls == ["https://10.0.0.1:2379", "https://[fd00::1]:2379"]
    assert (address.user, address.password) == ("me", "secret")


def test_a_password_is_not_shown() -> None:
    address = parse_etcd_address("etcd://me:secret@10.0.0.1:2379")
    assert "secret" not in str(address) + repr(address)
    with pytest.raises(TransferError) as refusal:
        parse_etcd_address("etcd://me:secret@10.0.0.1")
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    "text", ["etcd://", "etcd://host", "http://host:1", "etcd://host:1,", "etcd://a b:1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(TransferError, match="is not an address of etcd"):
        parse_etcd_address(text)


def test_the_own_address_is_on_the_network_of_etcd() -> None:
    assert own_address_towards(parse_etcd_address("etcd://127.0.0.1:2379")) == "127.0.0.1"
