"""Several ranks a host: they sum among themselves, and one of them speaks for the host.

The lowest rank of a host leads it (`leader`); the others follow (`follower`). A bucket's way:

1. Each rank copies its gradient into a row of shared memory, and its message says so.
2. When all rows are there, each rank sums its shard of them, in rank order.
3. The leader reduces the sum among the leaders of all hosts, with the policy, the books and the
   engine (`gradwire.training.pipeline`).
4. Each rank copies the result out of the shared memory.

The first message of a step carries what the rank votes for, and the last one of the leader carries
the step's report, so all ranks go into the next step with the same decisions.
"""
