"""The address over which processes connect: that of an interface, or an error that names it."""

from __future__ import annotations

import pytest

from fold3d.comms.interface import address_of, local_address
from fold3d.errors import ConfigError


def test_an_interface_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doctor leaves such a card out; for a training, which was told to take it, it is an error."""
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(OSError):
        address_of("fold3d-none")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "fold3d-none")
    with pytest.raises(ConfigError, match=r"interface fold3d-none has no IPv4 address .* GLOO_SOCKET_IFNAME"):
        local_address()
