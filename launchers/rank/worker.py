"""`python -m laddertron.launchers.rank.worker`: one process per rank, started by mpirun, srun or torchrun. The address
and secret of its owner are in the environment. A rank that raises reports its traceback and exits at once, because its
peers wait for it in a collective.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import traceback

from ...engine.config import load as deploy
from ...models.config.json_fields import Refusal
from ...topology.comm.collectives import CollectiveTimeout, CommunicationError
from ...topology.placement.identity import Identity, IdentityError, identify, require_world
from ..control.control_client import ControlClient, address_and_secret
from ..control.processes import die_with_parent, ended_by_parent_alone, few_descriptors
from ..control.reach import Unreached
from ..job.rank_logs import set_up_logs
from .rank_status import Status

log = logging.getLogger(__name__)


def main() -> int:
    """Runs a rank. Returns the exit status: 0 after an orderly shutdown, 1 after an error (reported over the channel),
    2 if this process is no rank."""
    die_with_parent()  # a rank exits with mpirun, even if it is suspended
    ended_by_parent_alone()  # ^C, or a service's stop, may reach every process: the launcher ends its ranks in order
    try:
        identity = identify()
        if identity is None:
            raise IdentityError("not a rank of mpirun, srun or torchrun: use `laddertron run` or `laddertron serve`")
        address, secret = address_and_secret(os.environ)
    except ValueError as fault:
        print(f"laddertron worker: {fault}", file=sys.stderr)
        return 2
    set_up_logs(identity.rank, identity.node)
    status = Status()
    client = ControlClient(address, secret, identity.rank, identity.local_rank, status.beat, status.dump)
    try:
        _run(client, identity, status, secret)
    except BaseException as error:
        report(error, client)
        os._exit(1)
    client.close()
    return 0


def report(error: BaseException, client: ControlClient) -> None:
    """Reports over the channel why this rank fails."""
    match error:
        case CommunicationError():
            # The exit of another rank breaks this one's collectives: that rank's error is the cause.
            peer = error.rank if isinstance(error, CollectiveTimeout) else -1
            client.fail(f"{type(error).__name__}: {error}", consequence=True, unreached=peer)
        case Unreached():
            client.fail(str(error), unreached=error.rank)
        case Refusal():  # an error of the model or configuration, clear without a traceback
            client.fail(str(error), refused=True)
        case _:
            few = few_descriptors() if isinstance(error, OSError) and error.errno == errno.EMFILE else ""
            client.fail(f"{error}: {few}" if few else "".join(traceback.format_exception(error)))
            traceback.print_exception(error)
            sys.stderr.flush()


def _run(client: ControlClient, identity: Identity, status: Status, secret: bytes) -> None:
    from .rank import run_rank  # imports numpy: only once the channel sends heartbeats

    deployment = deploy.from_json(json.loads(client.config))
    require_world(identity, deployment.parallel.world.one_replica())
    run_rank(deployment, identity, client, status, secret, standby=client.standby)


if __name__ == "__main__":
    sys.exit(main())
