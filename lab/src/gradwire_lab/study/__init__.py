"""`gradwire bench accuracy`: what bounded loss costs in the quality of training (docs/accuracy.md).

Four workers train in one process; their gradients travel through the shipping policies, pipeline
and protocol in virtual time (`gradwire.sim.job`).
"""
