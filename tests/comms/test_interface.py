"""Which network card is near to an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fold3d.comms import interface
from fold3d.comms.interface import address_of, local_address
from fold3d.errors import ConfigError

GPU = "0000:1b:00.0"
SWITCH = "pci0000:16/0000:16:02.0/0000:17:00.0"
"""Of the GPU, up to its own slot."""
Card = Callable[..., None]


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """A system with a GPU behind a switch."""
    (tmp_path / "devices" / SWITCH / GPU).mkdir(parents=True)
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    (tmp_path / "bus/pci/devices" / GPU).symlink_to(tmp_path / "devices" / SWITCH / GPU)
    return tmp_path


@pytest.fixture
def add(sysfs: Path) -> Card:
    """Adds a card: its name, the bridges above it, its address, and whether it is up."""

    def add(name: str, way: str, address: str, *, up: bool = True, kind: str = "infiniband") -> None:
        place = sysfs / "devices" / way / address
        place.mkdir(parents=True)
        card = sysfs / "class" / kind / name
        card.mkdir(parents=True)
        (card / "device").symlink_to(place)
        if kind == "infiniband":
            (card / "ports/1").mkdir(parents=True)
            (card / "ports/1/state").write_text("4: ACTIVE\n" if up else "1: DOWN\n")
        else:
            (card / "operstate").write_text("up\n" if up else "down\n")

    return add


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(interface, "pci_address", lambda device: GPU if device.type == "cuda" else None)
    for setting in ("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(setting, raising=False)
    return torch.device("cuda", 0)


def test_the_card_behind_the_same_switch(sysfs: Path, add: Card, device: torch.device) -> None:
    add("mlx5_0", SWITCH, "0000:19:00.0")
    add("mlx5_1", "pci0000:64/0000:64:02.0", "0000:65:00.0")
    add("eth0", SWITCH, "0000:1a:00.0", kind="net")
    assert interface.nearest_cards(device, sysfs) == "mlx5_0"


def test_equally_near_cards_are_one(sysfs: Path, add: Card, device: torch.device) -> None:
    add("mlx5_0", "pci0000:64/0000:64:02.0", "0000:65:00.0")
    add("mlx5_1", "pci0000:80", "0000:81:00.0")
    assert interface.nearest_cards(device, sysfs) == "mlx5_0+mlx5_1"


@pytest.mark.parametrize(
    ("setting", "card"),
    [("mlx5_1", "mlx5_1"), ("^mlx5_0", "mlx5_1"), ("=mlx5_1:1", "mlx5_1"), ("mlx5", "mlx5_0"), ("^=mlx5_0", "mlx5_1")],
)
def test_a_user_s_choice(
    setting: str, card: str, sysfs: Path, add: Card, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    add("mlx5_0", SWITCH, "0000:19:00.0")
    add("mlx5_1", "pci0000:64", "0000:65:00.0")
    monkeypatch.setenv("NCCL_IB_HCA", setting)
    assert interface.nearest_cards(device, sysfs) == card


def test_ethernet_where_no_infiniband_is_up(sysfs: Path, add: Card, device: torch.device) -> None:
    add("mlx5_0", SWITCH, "0000:19:00.0", up=False)
    add("eth0", "pci0000:64", "0000:65:00.0", kind="net", up=False)
    add("eth1", "pci0000:80", "0000:81:00.0", kind="net")
    assert interface.nearest_cards(device, sysfs) == "eth1"


def test_nobody_says(sysfs: Path, add: Card, device: torch.device) -> None:
    assert interface.nearest_cards(device, sysfs) == ""
    add("mlx5_0", SWITCH, "0000:19:00.0")
    assert interface.nearest_cards(torch.device("cpu"), sysfs) == ""
    (sysfs / "bus/pci/devices" / GPU).unlink()
    assert interface.nearest_cards(device, sysfs) == ""


def test_an_interface_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doctor leaves such a card out; for a training, which was told to take it, it is an error."""
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(OSError):
        address_of("fold3d-none")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "fold3d-none")
    with pytest.raises(ConfigError, match=r"interface fold3d-none has no IPv4 address .* GLOO_SOCKET_IFNAME"):
        local_address()
