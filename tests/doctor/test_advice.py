"""What the doctor says, from what it found: nothing of a healthy host, the remedy of each fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fold3d.doctor.advice import Speed, advice, too_slow
from fold3d.doctor.exchange import rounds
from fold3d.doctor.facts import Card, Facts, Gpu, by_host, find_facts, nvlinks_of, pcie_speed

ETH, IB = Card("eth0", "10.0.0.1", 25.0), Card("ib0", "10.1.0.1", 200.0)
CPU = Facts(
    host="node-0",
    identity="a system and its network",
    fold3d="0.1.0",
    python="3.11.7",
    torch="2.13.0+cpu",
    built_for="2.13.0",
    compiler="12.2.0",
    nvcc=None,
    transformers="5.23.0",
    cuda=None,
    nccl=None,
    cores=8,
    processes=1,
    memory=64 << 30,
    available=60 << 30,
    devices=(),
    nvlinks=None,
    has_nvidia=False,
    mps=False,
    cards=(ETH,),
    address="10.0.0.1",
    interface="",
    own_name="10.0.0.1",
    nccl_interface="",
    shm=8 << 30,
    shm_free=8 << 30,
    open_files=65536,
    locked=-1,
    max_connections="",
    module_loading="EAGER",
    launch_order="1",
    threads=8,
)
GPU = replace(
    CPU,
    torch="2.13.0+cu130",
    cuda="13.0",
    nvcc="13.0",
    nccl="2.28.3",
    devices=(Gpu("NVIDIA H100", 80 << 30, 63.0),) * 4,
    nvlinks=6,
    has_nvidia=True,
    processes=4,
    threads=2,
)


@pytest.mark.parametrize("facts", [CPU, GPU])
def test_nothing_is_said_of_a_healthy_job(facts: Facts) -> None:
    other = replace(facts, host="node-1", cards=(replace_address(ETH, "10.0.0.2"),), address="10.0.0.2")
    assert advice([facts]) == [] and advice([facts, facts, other, other]) == []


def replace_address(card: Card, address: str) -> Card:
    return replace(card, address=address)


@pytest.mark.parametrize(
    ("facts", "changes", "text"),
    [
        (CPU, {"built_for": "2.12.1"}, "fold3d was built for torch 2.12.1 and runs with 2.13.0+cpu; build it again"),
        (CPU, {"has_nvidia": True}, "install a torch with CUDA"),
        (GPU, {"devices": (), "processes": 1}, "torch has CUDA but sees no GPU"),
        (GPU, {"nvcc": None}, 'built without CUDA kernels, which kernels="fold3d" needs'),
        (GPU, {"processes": 8, "threads": 1}, "8 processes share 4 GPU(s) without MPS"),
        (GPU, {"max_connections": "1"}, "CUDA_DEVICE_MAX_CONNECTIONS=1"),
        (GPU, {"module_loading": "LAZY"}, "export CUDA_MODULE_LOADING=EAGER"),
        (GPU, {"launch_order": ""}, "export NCCL_LAUNCH_ORDER_IMPLICIT=1"),
        (GPU, {"shm_free": 64 << 20}, "/dev/shm has 64 MiB left, and 4 process(es) want 256"),
        (CPU, {"shm_free": 0}, "/dev/shm has 0 MiB left"),
        (CPU, {"open_files": 1024}, "ulimit -n 65536"),
        (GPU, {"locked": 65536}, "ulimit -l unlimited"),
        (CPU, {"processes": 4}, "export OMP_NUM_THREADS=2"),
        (CPU, {"interface": "eth9", "address": "none ([Errno 19] No such device)"}, "GLOO_SOCKET_IFNAME=eth9 has no"),
    ],
)
def test_each_fault_has_its_remedy(facts: Facts, changes: dict[str, Any], text: str) -> None:
    said = advice([replace(facts, **changes)])
    assert len(said) == 1 and text in said[0] and said[0].startswith("node-0: ")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"address": "127.0.1.1"}, "other hosts would be told to connect to 127.0.1.1"),
        ({"own_name": "127.0.1.1"}, "its own name leads to 127.0.1.1, so gloo would tell other hosts to connect to it"),
        ({"own_name": ""}, "its own name leads to no address, so gloo would tell other hosts to connect to 127.0.0.1"),
        ({"cards": (ETH, IB)}, "several network cards (eth0, ib0), and nobody says which"),
        ({"interface": "eth0", "nccl_interface": "ib0"}, "gloo takes eth0 and NCCL ib0"),
    ],
)
def test_the_network_matters_between_hosts(changes: dict[str, Any], text: str) -> None:
    odd = replace(GPU, **changes)
    assert advice([odd]) == []
    said = advice([odd, replace(GPU, host="node-1")])
    assert len(said) == 1 and text in said[0] and "node-0" in said[0]
    named = replace(odd, cards=(ETH, IB), interface="eth0", nccl_interface="eth0", address="10.0.0.1")
    assert advice([named, replace(GPU, host="node-1")]) == []


def test_hosts_of_one_name_are_told_apart() -> None:
    """As containers that are all called localhost: taken for one, nothing was said of the network between them."""
    here, there = (replace(CPU, host="localhost", identity=place, own_name="127.0.0.1") for place in "ab")
    assert list(by_host([here, here, there])) == ["localhost (of rank 0)", "localhost (of rank 2)"]
    assert list(by_host([here, here])) == ["localhost"] and advice([here, here]) == []
    said = advice([here, here, there])
    assert [text.split(":")[0] for text in said] == ["localhost (of rank 0)", "localhost (of rank 2)"]
    assert all("export GLOO_SOCKET_IFNAME" in text for text in said)


def test_versions_that_differ_are_named_with_their_ranks() -> None:
    other = replace(GPU, host="node-1", torch="2.12.0+cu130", built_for="2.12.0", nccl="2.27.1")
    said = advice([GPU, other, GPU, other])
    assert said == [
        "versions of torch differ: 2.13.0+cu130 on rank 0, 2, 2.12.0+cu130 on rank 1, 3; install the same on all hosts",
        "versions of nccl differ: 2.28.3 on rank 0, 2, 2.27.1 on rank 1, 3; install the same on all hosts",
    ]
    slower = replace(GPU, host="node-1", devices=(Gpu("NVIDIA A100", 80 << 30, 31.5),) * 4)
    assert "different GPUs" in advice([GPU, slower])[0]


def test_slow_is_less_than_half() -> None:
    fast, slow, unknown = (Speed("copies", speed, of, "look there") for speed, of in ((20, 32), (5, 32), (1, None)))
    assert too_slow([fast, unknown]) == []
    assert too_slow([slow, fast]) == ["copies: 5.00 GB/s, and the hardware should give 32.00; look there"]


@given(st.integers(1, 40))
def test_every_pair_meets_once(world: int) -> None:
    made = rounds(world)
    assert len(made) == (world - 1 + world % 2 if world > 1 else 1)
    pairs = [pair for one in made for pair in one]
    assert sorted(pairs) == [(a, b) for a in range(world) for b in range(a + 1, world)]
    for one in made:
        busy = [rank for pair in one for rank in pair]
        assert len(busy) == len(set(busy))


TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-31
GPU1\tNV18\t X \tSYS\tSYS\t0-31
GPU2\tSYS\tSYS\t X \tSYS\t32-63
NIC0\tPIX\tSYS\tSYS\t X
"""


def test_what_nvidia_smi_says_of_nvlink() -> None:
    assert nvlinks_of(TOPOLOGY) == 1
    assert nvlinks_of(None) is None and nvlinks_of("No devices were found\n") is None


def test_the_speed_of_a_slot() -> None:
    assert pcie_speed("16.0 GT/s PCIe", "16") == pytest.approx(31.5, rel=0.01)
    assert pcie_speed("32.0 GT/s PCIe", "16\n") == pytest.approx(63.0, rel=0.01)
    assert pcie_speed("", "") is None and pcie_speed("Unknown", "16") is None and pcie_speed("8.0 GT/s", "0") is None


def test_the_facts_of_this_host() -> None:
    facts = find_facts()
    assert facts.torch.startswith(facts.built_for) and facts.cores >= 1 and facts.available <= facts.memory
    assert facts.devices == () and facts.nccl is None
    assert all(card.name != "lo" for card in facts.cards)
