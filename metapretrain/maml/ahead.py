"""Traced graphs: cut into parts, and compiled by inductor in processes that fill torch's cache on disk."""

from __future__ import annotations

import copyreg
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

logger = logging.getLogger(__name__)

# Of inductor: what reads few tensors is computed again where it is needed, instead of written and read.
INDUCTOR = {"realize_reads_threshold": 8, "realize_opcount_threshold": 200}
LONGEST = 150  # seconds that a process is waited for
Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


def forms_of(given: Iterable[Tensor]) -> list[Form]:
    """Shapes, strides, types and devices."""
    return [(tuple(x.shape), x.stride(), x.dtype, x.device) for x in given]


def by_inductor(graph: fx.GraphModule, forms: Sequence[Form]) -> Callable[..., Any]:
    """The graph compiled for inputs of these forms, of which alone its key in torch's cache is then made."""
    from torch import _inductor
    from torch._guards import TracingContext, tracing

    inputs: list[Any] = [torch.empty_strided(*form[:2], dtype=form[2], device=form[3]) for form in forms]
    plain = torch.autocast(inputs[0].device.type, enabled=False)  # the graph holds its casts
    with tracing(TracingContext(_fake_mode(allow_non_fake_inputs=True))), torch.no_grad(), plain, _formats_by_name():
        return _inductor.compile(graph, inputs, options=INDUCTOR)  # type: ignore[no-any-return]


# Operations that are as cheap to repeat as those number by number, which torch tags as pointwise.
CHEAP = (
    "constant_pad_nd",
    "fill",
    "full",
    "full_like",
    "scalar_tensor",
    "_to_copy",
    "zeros_like",
    "ones_like",
    "arange",
)


def name_of(node: fx.Node) -> str:
    """The operation of torch that a node calls, such as "mm"; "" if it calls none."""
    target: Any = node.target
    return target.overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else ""


def is_view(node: fx.Node) -> bool:
    """Whether a node gives its input's own memory in another shape."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target._schema.name == "aten::_unsafe_view" or any(r.alias_info is not None for r in target._schema.returns)


def is_cheap(node: fx.Node) -> bool:
    """Inputs, views and what is computed number by number."""
    if node.op in ("placeholder", "get_attr") or is_view(node):
        return True
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or name_of(node) in CHEAP


def ends_of(graph: fx.GraphModule) -> tuple[list[fx.Node], list[fx.Node]]:
    """Inputs and outputs."""
    *nodes, last = graph.graph.nodes
    return [node for node in nodes if node.op == "placeholder"], list(last.args[0])


def later_than(given: Sequence[fx.Node]) -> set[fx.Node]:
    """These nodes, and all that depend on them."""
    found, waiting = set(given), list(given)
    while waiting:
        new = [user for user in waiting.pop().users if user not in found]
        found.update(new)
        waiting += new
    return found


def needed(
    wanted: Iterable[fx.Node | None], late: set[fx.Node], cheap: Callable[[fx.Node], bool] = is_cheap
) -> list[fx.Node]:
    """What the wanted nodes need of those that are not `late`, but for inputs and for what is `cheap` to repeat."""
    found, seen = dict[fx.Node, None](), set[fx.Node]()
    waiting = [node for node in wanted if node is not None]
    while waiting:
        node = waiting.pop()
        if node in seen or node.op == "placeholder":
            continue
        seen.add(node)
        if node in late or cheap(node):
            waiting += node.all_input_nodes
        else:
            found[node] = None
    return list(found)


def part_of(graph: fx.GraphModule, given: Sequence[fx.Node], wanted: Sequence[fx.Node | None]) -> fx.GraphModule:
    """The part of a graph that computes the wanted nodes from those that are given."""
    needs, waiting, part = set(given), [node for node in wanted if node is not None], fx.Graph()
    known = {node: part.placeholder(node.name) for node in given}
    for node, own in known.items():
        own.meta = dict(node.meta)
    while waiting:
        if (node := waiting.pop()) not in needs:
            needs.add(node)
            waiting += node.all_input_nodes
    for node in graph.graph.nodes:
        if node in needs and node not in known:
            known[node] = part.node_copy(node, known.__getitem__)
    part.output([None if node is None else known[node] for node in wanted])
    return fx.GraphModule(graph, part)


class Ahead:
    """Processes that compile graphs, so that :func:`by_inductor` finds them on disk; if one fails, it compiles itself.

    They start before the graphs are known, which hides how long Python and torch need for it; on a CPU none does.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        python = sys.executable and not hasattr(sys, "frozen")  # the program of a frozen one would begin again
        self.count = count if python and _pays(device) else 0

    def __enter__(self) -> Ahead:
        quiet, command = subprocess.DEVNULL, [*COMMAND, *map(str, sys.path)]
        try:
            for _ in range(self.count):
                self.processes.append(subprocess.Popen(command, stdin=-1, stdout=quiet, stderr=quiet))
        except OSError as error:
            logger.info("no process compiles ahead: %s", error)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            if process.stdin:
                process.stdin.close()

    def compile(self, graphs: Sequence[fx.GraphModule]) -> None:
        """Have each graph compiled by a process, for inputs as those of its tracing, and wait for all."""
        if not self.processes:
            return
        pool = ThreadPoolExecutor(len(self.processes))
        try:
            if (mark := _mark(graphs)).exists():
                return
            handed = pool.map(_hand, self.processes, map(_packed, graphs))
            if not any(codes := list(handed)):
                mark.touch()
            else:
                logger.info("processes that compile ahead have failed: exit codes %s", codes)
        except Exception as error:  # of any kind: packing is not part of torch's interface; or one takes too long
            logger.info("graphs are not compiled ahead: %s", error)


PATHS = "import sys; sys.path[:] = sys.argv[1:]"  # in place of the working folder, whose modules may shadow others
COMMAND = [sys.executable, "-c", f"{PATHS}; from {__name__} import _compile_given; _compile_given()"]


def _pays(device: torch.device) -> bool:
    """Whether there is a GPU to compile for, cores to spare (not beside many other trainings), and a cache to fill."""
    if device.type != "cuda" or os.getloadavg()[0] > (os.cpu_count() or 1) / 2:
        return False
    from torch._inductor import config

    cores = config.compile_threads or 1  # that this process may use, unless TORCHINDUCTOR_COMPILE_THREADS says less
    return cores >= 4 and config.fx_graph_cache and not config.force_disable_caches


def _hand(process: subprocess.Popen[bytes], data: bytes) -> int:
    process.communicate(pickle.dumps(data), LONGEST)  # which ignores that a process is gone
    return process.returncode


def _fake_mode(**options: bool) -> Any:
    """What torch's cache on disk asks for."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), **options)


def _mark(graphs: Sequence[fx.GraphModule]) -> Path:
    """A file that is in torch's cache once these graphs are: with it there is nothing to wait for."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    forms = [[node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"] for graph in graphs]
    told = torch.__version__, [(graph.code, forms_of(of)) for graph, of in zip(graphs, forms, strict=True)]
    return Path(cache_dir()) / f"metapretrain-{sha256(repr(told).encode()).hexdigest()}"


def _packed(graph: fx.GraphModule) -> bytes:
    """The graph, the form of its inputs, and the settings that are part of a graph's key in the cache."""
    from torch._inductor import config
    from torch.fx._graph_pickler import GraphPickler, Options

    forms = forms_of(node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder")
    settings = torch.get_default_dtype(), torch.backends.cuda.matmul.fp32_precision, config.save_config()
    plain = Options(ops_filter=None, node_metadata_key_filter=lambda key: False)
    with _formats_by_name():
        return GraphPickler.dumps((graph, forms, settings), plain)


@contextmanager
def _formats_by_name() -> Iterator[None]:
    """Pickle a memory format, of a graph or a key, by its name: pickle itself takes any module that holds torch."""
    kind, before = torch.memory_format, copyreg.dispatch_table.get(torch.memory_format)
    copyreg.pickle(kind, lambda found: (_of_torch, (str(found).removeprefix("torch."),)))
    try:
        yield
    finally:
        copyreg.dispatch_table.pop(kind, None)  # which another thread may have done
        if before is not None:
            copyreg.pickle(kind, before)


def _of_torch(name: str) -> Any:
    return getattr(torch, name)


def _compile_given() -> None:
    """What each process does."""
    from torch._inductor import config
    from torch.fx._graph_pickler import GraphPickler  # loads inductor, before the graph is there

    if torch.cuda.is_available():
        torch.cuda.init()
    given: Any = GraphPickler.loads(pickle.load(sys.stdin.buffer), _fake_mode())  # not to its end: a fork may hold it
    graph, forms, (dtype, precision, saved) = given
    graph.recompile()
    torch.set_default_dtype(dtype)
    torch.backends.cuda.matmul.fp32_precision = precision
    config.load_config(saved)
    config.compile_threads = max(1, (config.compile_threads or 1) // 3)  # of three processes; it is no part of the key
    if (device := forms[0][3]).type == "cuda":
        torch.cuda.set_device(device)
    by_inductor(graph, forms)
