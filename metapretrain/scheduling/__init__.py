"""Which source task is worth training on now: utilities from probes, and the schedulers they have to beat."""

from metapretrain.scheduling.agreement import Agreement, agreement
from metapretrain.scheduling.blocks import BlockScheduler
from metapretrain.scheduling.choice import Choice, Cost
from metapretrain.scheduling.exp3 import Exp3
from metapretrain.scheduling.probes import FunctionProbe, LoaderProbe, Probe
from metapretrain.scheduling.scheduler import UtilityScheduler
from metapretrain.scheduling.simple import Fixed, Proportional, RoundRobin, Uniform
from metapretrain.scheduling.utility import NORMALISATIONS, UTILITIES, probe_units

__all__ = [
    "NORMALISATIONS",
    "UTILITIES",
    "Agreement",
    "BlockScheduler",
    "Choice",
    "Cost",
    "Exp3",
    "Fixed",
    "FunctionProbe",
    "LoaderProbe",
    "Probe",
    "Proportional",
    "RoundRobin",
    "Uniform",
    "UtilityScheduler",
    "agreement",
    "probe_units",
]
