"""Which source task is worth training on now: utilities from probes, and the schedulers they have to beat."""

from metapretrain.scheduling.probes import FunctionProbe, LoaderProbe, Probe
from metapretrain.scheduling.schedulers import (
    BlockScheduler,
    Choice,
    Cost,
    Exp3,
    Fixed,
    Proportional,
    RoundRobin,
    Uniform,
)
from metapretrain.scheduling.utility import (
    NORMALISATIONS,
    UTILITIES,
    Agreement,
    UtilityScheduler,
    agreement,
    probe_units,
)

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
