"""Several ranks a host: they sum among themselves, and one of them sends the sum.

The lowest rank of a host leads it (`leader`); the others follow (`follower`). A bucket's way:

1. Each rank copies its gradient into a row of shared memory, and sends a message when it is there.
2. When all rows are there, each rank sums its shard of them, in rank order.
3. The leader reduces the sum among the leaders of all hosts, with the policy, the books and the
   engine (`gradwire.training.pipeline`).
4. DDP copies the result out of the shared memory on each rank; under the bare hook it is copied to
   DDP's bucket first.

A follower's first message of a step carries its ballot, and the leader's last one carries the
step's report, so all ranks go into the next step with the same decisions.
"""
