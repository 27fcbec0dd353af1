"""Schedulers that choose the next pretraining task: by utilities from probes, and simple ones to compare with."""

from metapretrain.scheduling.probes import FunctionProbe, LoaderProbe, Probe
from metapretrain.scheduling.registry import (
    SCHEDULERS,
    Schedule,
    build_scheduler,
    option_defaults,
    parse_schedule,
    register,
)
from metapretrain.scheduling.schedulers import (
    BlockScheduler,
    Choice,
    Cost,
    Exp3,
    Fixed,
    LossExp3,
    Proportional,
    RoundRobin,
    Uniform,
)
from metapretrain.scheduling.utility import (
    NORMALISATIONS,
    UTILITIES,
    Agreement,
    SoftmaxUtility,
    UtilityScheduler,
    agreement,
    probe_units,
    step_of,
)

__all__ = ["NORMALISATIONS", "SCHEDULERS", "UTILITIES", "Agreement", "BlockScheduler", "Choice", "Cost", "Exp3"]
__all__ += ["Fixed", "FunctionProbe", "LoaderProbe", "LossExp3", "Probe", "Proportional", "RoundRobin", "Schedule"]
__all__ += ["SoftmaxUtility", "Uniform", "UtilityScheduler", "agreement", "build_scheduler", "option_defaults"]
__all__ += ["parse_schedule", "probe_units", "register", "step_of"]
