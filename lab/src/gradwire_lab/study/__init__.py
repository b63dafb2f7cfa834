"""`gradwire bench accuracy` measures what bounded loss costs in quality (docs/accuracy.md).

Four workers train in one process; their gradients travel through the shipping policies, pipeline
and protocol in virtual time (`gradwire.sim.job`).
"""
