"""Compares what the ranks of a replica have read of the model, if no owner has a connection to each of them: under an
outer mpirun.
"""

from __future__ import annotations

from dataclasses import replace

from ...engine.config.schema import Deployment
from ...engine.identity import ModelIdentity, between_ranks, folders_of
from ...models.config.json_fields import Refusal
from ...models.weights.identity import Weights, tables_in
from ...topology.comm.groups import Communicator
from ..control.messages import Announce, from_wire, to_wire
from ..job.detect import SAME_FILES, differing


class ModelDiffers(Refusal):
    """The ranks have read different models."""


def agree(communicator: Communicator, deployment: Deployment, node: str, own: Announce) -> list[Announce]:
    """Compares the announcements of all ranks on the rank with `leads`, and returns them there, for the owner. All
    ranks must call it. Raises ModelDiffers, which names rank, host, file and tensor."""
    rows = communicator.collect(f"{node}\n".encode() + to_wire(own))
    if not communicator.leads:
        return []
    nodes, announced = list[str](), list[Announce]()
    for row in rows:
        name, _, payload = row.partition(b"\n")
        message = from_wire(payload, "rank")
        assert isinstance(message, Announce)
        nodes.append(name.decode())
        announced.append(message)
    samples = {rank: message.samples for rank, message in enumerate(announced)}
    if (odd := differing({rank: message.digests for rank, message in enumerate(announced)})) is not None:
        raise ModelDiffers(f"rank {odd[0]} on {nodes[odd[0]]}: {odd[1]}")
    if between_ranks(None, samples) is not None:
        # NOTE: the headers name the tensor, and are only read for the error
        tables = {part: Weights(tables_in(folder)) for part, folder in folders_of(deployment).items()}
        difference = between_ranks(ModelIdentity("", {}, tables), samples)
        assert difference is not None
        than = f"rank {difference.other} on {nodes[difference.other or 0]}"
        raise ModelDiffers(
            f"rank {difference.rank} on {nodes[difference.rank]}: {difference.text} from {than}: {SAME_FILES}"
        )
    return [replace(message, name=f"rank {rank} on {nodes[rank]}") for rank, message in enumerate(announced)]
