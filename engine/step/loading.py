"""Loads a group's weights and logs the time; on a CPU with a hot standby, retains them in shared memory, where the
standby's ranks can use them.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import time
from collections.abc import Callable

from ... import __version__
from ...models.llama import LlamaModel
from ...models.pages import HeldPages
from ...models.weights.load import Progress
from ...models.weights.mapping import Source
from ...topology.comm.groups import Communicator, gather_number
from ...topology.hardware import cpu_tier
from ..config.schema import ModelSection, ParallelConfig

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_MOST = 32 << 20
"""The largest value that glibc accepts; larger blocks are always mapped. Zeroing their pages costs little compared with
the work on a tensor of that size."""
_KEPT = 256 << 20


def held_weights(
    source: Source,
    model: ModelSection,
    p: ParallelConfig,
    communicator: Communicator,
    file: int,
    identity: object = None,
) -> HeldPages | None:
    """The pages for this rank's packed weights: the retained ones in `file` (-1: none) if they match the checkpoint and
    deployment, else new ones. None if memfd is unavailable. identity: what this rank has read of the model so far; the
    retained weights keep that of the rank that packed them."""
    files = sorted({stored.file for stored in source.tensors.values()})
    stats = [(str(path), (status := path.stat()).st_size, status.st_ctime_ns, status.st_ino) for path in files]
    pipeline = communicator.pipeline
    layout = p.world.tp, p.world.stages, p.pipeline_layers, p.deterministic, p.embedding
    place = communicator.rank, None if pipeline is None else pipeline.stage
    experts = p.expert_layout, p.dense_path, communicator.layout.per_node
    made = __version__, model, layout, experts, place, cpu_tier.current(), identity, stats
    label = hashlib.sha256(repr(made).encode()).hexdigest()
    if file >= 0:
        try:
            retained = HeldPages(file)
        except (OSError, ValueError) as error:
            log.warning("cannot map the retained weights, loading them: %s", error)
        else:
            if retained.label == label:
                return retained
            log.warning("the retained weights do not match the checkpoint, deployment or CPU tier, loading them")
    try:
        fresh = HeldPages()
    except OSError as error:  # a container that forbids the call
        log.warning("memfd unavailable, a hot standby has to load the weights: %s", error)
        return None
    fresh.label = label
    return fresh


def share_of_node(communicator: Communicator) -> tuple[int, int]:
    """This rank's part of the work that the ranks of a node divide, and their number. Nodes may have different copies
    of a folder, so each node reads all of its own."""
    return communicator.rank % communicator.layout.per_node, communicator.layout.per_node


def load_weights(
    model: LlamaModel,
    source: Source,
    timeout_s: float,
    communicator: Communicator,
    progress: Progress | None,
    say: Callable[[str], None],
) -> None:
    """Fills the model and logs the time. All ranks of the group call it at once. Sets the collectives' timeout to the
    longest load: a node's storage may be slow, and a lost rank is detected at once anyway. Raises CheckpointError or
    CommunicationError."""
    communicator.set_timeout(timeout_s)
    nodes, began = len(communicator.layout.nodes), time.monotonic()
    read = model.load(source, progress, share_of_node(communicator))
    took, pages = time.monotonic() - began, model.ops.pages
    if isinstance(pages, HeldPages) and pages.complete and not pages.filled:
        pages.seal(model.order)
    total = int(gather_number(communicator.gather, read).sum())
    if communicator.pipeline is not None:
        communicator.pipeline.least(0)  # every stage has loaded
    on = f"{communicator.size} rank{'s' * (communicator.size > 1)} on {nodes} node{'s' * (nodes > 1)}"
    if communicator.pipeline is not None:
        on = f"stage {communicator.pipeline.stage}: {on}"
    reused = ", the rest lay in memory" if pages is not None and pages.filled else ""
    verb = "read" if source.seed is None else "drew (load_format dummy)"
    say(f"weights: {on} {verb} {total / 1e9:.2f} GB in {took:.1f} s{reused}")


def give_back_freed() -> None:
    """Makes glibc map blocks of a MiB or more, and unmap them when freed. By default it raises that threshold whenever
    a larger block is freed, and would keep the memory of weights after they were repacked."""
    _mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def keep_freed() -> None:
    """Makes glibc keep freed blocks of up to 32 MiB for the next step's activations: zeroing the pages of new blocks
    took a tenth of a prompt's step. Only free memory at the heap's end beyond 256 MiB is returned; memory below a block
    in use stays, so expect the process to keep what its largest step needed."""
    _mallopt(_M_MMAP_THRESHOLD, _MMAP_MOST)
    _mallopt(_M_TRIM_THRESHOLD, _KEPT)


def _mallopt(key: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(key, value)
