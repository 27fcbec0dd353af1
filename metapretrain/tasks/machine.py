"""Where and how fast an experiment runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Where and how fast an experiment runs; none of it is part of the method.

    Args:
        device: torch's name of one.
        precision: `fp32` or `bf16`.
        compile: compile the model.
        cuda_graph: record updates as CUDA graphs; None: wherever that is possible.
        local_batchnorm: over several processes, BatchNorm takes each one's own rows and not those of all.
        rank, world: of this process, and how many there are.
    """

    device: str = "cpu"
    precision: str = "fp32"
    compile: bool = False
    cuda_graph: bool | None = None
    local_batchnorm: bool = False
    rank: int = 0
    world: int = 1
