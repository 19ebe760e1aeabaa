"""The load of a group's weights, with the line of the log that says what it took."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from ...models.llama import LlamaModel
from ...models.weights.load import Progress
from ...models.weights.mapping import Source
from ...topology.comm.groups import Communicator
from ..config.schema import Deployment


def load_weights(
    model: LlamaModel,
    source: Source,
    deployment: Deployment,
    communicator: Communicator,
    progress: Progress | None,
    say: Callable[[str], None],
) -> None:
    """Fills the model and says what that took. All ranks of the group call it at once. Raises CheckpointError or
    CommunicationError. Collectives wait as long as a load may take from here on: a node's storage may be slow, and a
    rank that ends is noticed at once."""
    communicator.set_timeout(deployment.daemon.load_timeout)
    per_node, nodes, began = communicator.layout.per_node, len(communicator.layout.nodes), time.monotonic()
    # Nodes may have different copies: each verifies all of its own, divided between its ranks.
    read = model.load(source, progress, (communicator.rank % per_node, per_node))
    took = time.monotonic() - began
    every = communicator.gather(np.array([read], np.int64).view(np.uint8))
    total = int(np.ascontiguousarray(every).view(np.int64).sum())
    if communicator.pipeline is not None:
        communicator.pipeline.least(0)  # every stage has loaded
    on = f"{communicator.size} ranks on {nodes} node{'s' * (nodes > 1)}"
    if communicator.pipeline is not None:
        on = f"stage {communicator.pipeline.stage}: {on}"
    say(f"weights: {on} read {total / 1e9:.2f} GB in {took:.1f} s")
