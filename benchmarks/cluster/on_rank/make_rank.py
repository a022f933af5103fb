"""make_rank(): a system, built on the calling rank."""

from __future__ import annotations

from benchmarks.cluster.scenarios import Scenario
from benchmarks.cluster.systems import Rank, System


def make_rank(system: System, scenario: Scenario) -> Rank:
    """Builds the system on the calling rank of an initialized job; all ranks call."""
    # Imported here: a rank needs only one of them.
    if system.family.library == "fold3d":
        from benchmarks.cluster.on_rank.fold3d_rank import Fold3dRank

        return Fold3dRank(scenario, system)
    if system.family.library == "load":
        from benchmarks.cluster.on_rank.load_rank import LoadRank

        return LoadRank(scenario, system)
    if system.family.library == "data":
        from benchmarks.cluster.on_rank.data_rank import DataRank

        return DataRank(scenario, system)
    from benchmarks.cluster.on_rank.torch_rank import TorchRank

    return TorchRank(scenario, system)
