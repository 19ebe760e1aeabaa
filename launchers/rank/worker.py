"""`python -m laddertron.launchers.rank.worker`: one process per rank, started by mpirun, srun or torchrun.
Address and secret of its owner are in the environment. A rank that raises reports its traceback and exits at once:
its peers wait for it in a collective.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import traceback

from ...engine.config import load as deploy
from ...models.config.json_fields import Refusal
from ...topology.comm.collectives import CommunicationError
from ...topology.placement.identity import Identity, IdentityError, identify, require_world
from ..control.control_client import ControlClient, address_and_secret
from ..control.processes import die_with_parent
from ..job.rank_logs import set_up_logs
from .rank_status import Status

log = logging.getLogger(__name__)


def main() -> int:
    """Exit status: 0 after an orderly shutdown, 1 after an error (reported over the channel), 2 if this is no rank."""
    die_with_parent()  # a rank ends with mpirun, even if it is stopped
    # ^C goes to the whole foreground group: the launcher ends its ranks in order, they do not race it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
    except CommunicationError as error:
        # Another rank's end breaks this one's collectives: that one is to blame, and its words are the ones to read.
        client.fail(f"{type(error).__name__}: {error}", consequence=True)
        os._exit(1)
    except Refusal as refusal:
        client.fail(str(refusal), refused=True)  # a fault of the model or the configuration: a traceback would bury it
        os._exit(1)
    except BaseException:
        client.fail(traceback.format_exc())
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    client.close()
    return 0


def _run(client: ControlClient, identity: Identity, status: Status, secret: bytes) -> None:
    from .rank import run_rank  # torch comes with it: the channel is there before, and says that this process lives

    deployment = deploy.from_json(json.loads(client.config))
    parallel = deployment.parallel
    require_world(identity, parallel.tensor_parallel_size, stages=parallel.pipeline_parallel_size)
    run_rank(deployment, identity, client, status, secret, standby=client.standby)


if __name__ == "__main__":
    sys.exit(main())
