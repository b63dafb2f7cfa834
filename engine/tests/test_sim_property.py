"""Random jobs on random networks: every invariant is checked at each event, whatever happens.

The fabric checks trains and packet numbers as they leave and each op as it ends: the bound per
worker and region, critical chunks, identical replicas, every value explained by the masks (to the
bit where the plan is exact), withheld results, statistics, results untouched once reported.
"""

import pytest

from scenarios import must_be_ok, random_job

SEEDS = 1200
BATCH = 100


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_random_jobs_keep_every_invariant(first: int) -> None:
    for seed in range(first, first + BATCH):
        job = random_job(seed)
        try:
            fabric = job.run()
            must_be_ok(fabric, len(job.ops))
        except AssertionError as error:
            pytest.fail(f"seed {seed}: {error}\n{job}")


@pytest.mark.parametrize("seed", range(5000, 5020))
def test_one_seed_is_one_run(seed: int) -> None:
    job = random_job(seed)
    first, second = job.run(), job.run()
    assert first.trace_hash == second.trace_hash
    assert first.events == second.events
    job.seed += 1
    if job.link.loss or job.link.reorder or job.fabric_options["host_jitter"]:
        assert job.run().trace_hash != first.trace_hash
