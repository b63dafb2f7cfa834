"""Policies: each published system is one small module that writes plans and reads reports."""

from gradwire.policies.adaptive import Adaptive
from gradwire.policies.base import PlanContext, Policy
from gradwire.policies.dblp import DBLP
from gradwire.policies.ltp import LTP
from gradwire.policies.mlt import MLT
from gradwire.policies.netsenseml import NetSenseML
from gradwire.policies.optireduce import OptiReduce
from gradwire.policies.parts.regions import pool
from gradwire.policies.plot import PLOT, Calibration
from gradwire.policies.registry import create, names, policy_class, register
from gradwire.policies.reliable import Reliable

__all__ = [
    "DBLP",
    "LTP",
    "MLT",
    "PLOT",
    "Adaptive",
    "Calibration",
    "NetSenseML",
    "OptiReduce",
    "PlanContext",
    "Policy",
    "Reliable",
    "create",
    "names",
    "policy_class",
    "pool",
    "register",
]
