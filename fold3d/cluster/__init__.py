"""Many jobs on GPUs of several kinds: which runs where and when. Needs no torch; policies need scipy.

- `jobs`: jobs, clusters, and allocations, which say what part of the time a job has on which GPUs.
- `policies.allocate`: the allocation of a policy (Gavel, Narayanan et al., OSDI 2020).
- `rounds.place`: one round of an allocation. `simulate.simulate`: the rounds of days.
- `workload`, `rates`, `devices`: files with jobs, predicted and measured rates, and prices.
- `cost.offers`, `deadline.decide`: what a training costs, and spot machines with a deadline.
- `slurm`: rounds on a real Slurm.
"""
