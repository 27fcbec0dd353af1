"""Schedulers by name, their options read from the constructors; and `register`, which adds one."""

import inspect
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import torch

from metapretrain.checks import parse_value
from metapretrain.errors import InputError, one_of
from metapretrain.scheduling.probes import FunctionProbe, Params, Probe
from metapretrain.scheduling.schedulers import BlockScheduler, Fixed, LossExp3, Proportional, RoundRobin, Uniform
from metapretrain.scheduling.utility import SoftmaxUtility, TargetLosses, UtilityScheduler

SCHEDULERS: dict[str, type[BlockScheduler]] = {}
GIVEN = ("sources", "sizes", "targets", "params", "target_losses", "seed")  # by whoever runs the scheduler


def register(name: str, scheduler: type[BlockScheduler]) -> None:
    """Make a scheduler known by its name: to `--schedule` of every script, and to `--methods` of `run_schedule.py`.

    Its constructor gets those of `sources` ({name: probe}), `sizes` ({name: rows}), `targets` ({name: probe}),
    `params`, `target_losses` and `seed` that it names. Its other parameters are options: booleans, numbers, texts, or
    None.
    Raises InputError: a name that is taken or not of lower-case letters, digits and hyphens, something that is no
    scheduler, or a constructor that does not name its options.

    Example:
        >>> register("often", type("Often", (RoundRobin,), {}))
        >>> parse_schedule("often", ["a", "b"]).name, SCHEDULERS.pop("often").__name__
        ('often', 'Often')
    """
    if re.fullmatch(r"[a-z][a-z0-9-]*", name) is None:
        raise InputError(f"a scheduler's name has lower-case letters, digits and hyphens, such as my-own; got {name!r}")
    if not (isinstance(scheduler, type) and issubclass(scheduler, BlockScheduler)):
        raise InputError(f"scheduler {name} is {scheduler!r}; give a subclass of BlockScheduler")
    if name in SCHEDULERS and SCHEDULERS[name].__qualname__ != scheduler.__qualname__:
        raise InputError(f"there is a scheduler {name} already, {SCHEDULERS[name].__name__}; take another name")
    vague = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any(parameter.kind in vague for parameter in inspect.signature(scheduler).parameters.values()):
        raise InputError(f"the constructor of {scheduler.__name__} has * or **; name each option, with its default")
    SCHEDULERS[name] = scheduler


@dataclass(frozen=True)
class Schedule:
    """A scheduler by name, and the options that are not left at the defaults of its constructor.

    Example:
        >>> schedule = Schedule("utility", {"alpha": 0.05})
        >>> schedule.option("alpha"), schedule.option("samples"), schedule.option("gamma"), schedule.probes
        (0.05, 2, None, True)
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def option(self, name: str) -> Any:
        """The value of an option, given or the default; None where the scheduler has no such option."""
        known = option_defaults(self.name)
        return self.options.get(name, known.get(name))

    @property
    def probes(self) -> bool:
        """Whether the scheduler looks at losses of its own batches."""
        return "params" in inspect.signature(SCHEDULERS[self.name]).parameters


def option_defaults(name: str) -> dict[str, Any]:
    """The options of a scheduler and their defaults; `inspect.Parameter.empty` where one must be given.

    Example:
        >>> option_defaults("exp3")
        {'samples': 2, 'reward': 0.05, 'gamma': 0.1, 'updates': 10, 'turn': None}
    """
    parameters = inspect.signature(SCHEDULERS[one_of("schedule", name, SCHEDULERS)]).parameters
    return {key: parameter.default for key, parameter in parameters.items() if key not in GIVEN}


def parse_schedule(text: str, sources: Collection[str]) -> Schedule:
    """Read `round-robin`, `fixed:sst` (short for `fixed:source=sst`) or `utility:alpha=0.05`, for tasks `sources`.

    Raises InputError: an unknown schedule, source or option, or a value that the constructor refuses.

    Example:
        >>> parse_schedule("utility:alpha=0.05,samples=1", ["sst", "para"]).options
        {'alpha': 0.05, 'samples': 1}
    """
    name, _, rest = text.partition(":")
    known = option_defaults(name)
    needed = [option for option, default in known.items() if default is inspect.Parameter.empty]
    hints = get_type_hints(SCHEDULERS[name].__init__)
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        option, equals, value = part.partition("=")
        if not equals:
            missing = [option for option in needed if option not in options]
            if not missing:
                raise InputError(f"an option of {name} is name=value; got {part!r}, options: {', '.join(known)}")
            option, value = missing[0], part
        if one_of(f"option of {name}", option, known) in options:
            raise InputError(f"{option} of {name} is given twice; give it once")
        try:
            options[option] = parse_value(value, hints.get(option, type(known[option])))
        except InputError as error:
            raise InputError(f"{part}: {error}") from None
    for option in needed:
        if option not in options:
            usual = [f"{name}:{source}" for source in sources] if option == "source" else [f"{name}:{option}=..."]
            raise InputError(f"{name} needs its {option}: {', '.join(usual)}")
    schedule = Schedule(name, options)
    build_scheduler(schedule, dict.fromkeys(sources, 1), blank_probes(sources), [torch.zeros(1, requires_grad=True)])
    return schedule


def blank_probes(names: Collection[str]) -> dict[str, Probe]:
    """A probe for each name that stands for a real one where a scheduler is only planned."""
    return dict.fromkeys(names, FunctionProbe(lambda _: None, lambda _: torch.zeros(())))


def build_scheduler(
    schedule: Schedule,
    sizes: Mapping[str, float],
    probes: Mapping[str, Probe],
    params: Params,
    *,
    targets: Mapping[str, Probe] | None = None,
    target_losses: TargetLosses | None = None,
    seed: int = 0,
) -> BlockScheduler:
    """Return the scheduler that a schedule names; for what is not told here see :class:`UtilityScheduler`.

    `sizes`, such as training rows, are what `proportional` draws by; `probes` of the sources may be empty for a
    scheduler that does not look at losses; `targets`: probes of the tasks that should get better, None for the sources.

    Example:
        >>> scheduler = build_scheduler(Schedule("round-robin"), {"sst": 80, "sts": 55}, {}, [])
        >>> [scheduler.choose().source for _ in range(3)]
        ['sst', 'sts', 'sst']
    """
    given: dict[str, Any] = {"sources": probes or sizes, "sizes": sizes}
    given |= {"targets": probes if targets is None else targets, "target_losses": target_losses}
    given |= {"params": params, "seed": seed}
    scheduler = SCHEDULERS[one_of("schedule", schedule.name, SCHEDULERS)]
    wanted = inspect.signature(scheduler).parameters
    return scheduler(**{key: value for key, value in given.items() if key in wanted}, **schedule.options)


register("uniform", Uniform)
register("proportional", Proportional)
register("round-robin", RoundRobin)
register("utility", UtilityScheduler)
register("softmax", SoftmaxUtility)
register("exp3", LossExp3)
register("fixed", Fixed)
