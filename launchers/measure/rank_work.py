"""A measuring rank (bench, verify): loads its share of a deployment, works and answers in JSON lines."""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...engine.config import load as deploy
from ...models.config.json_fields import Refusal
from ...topology.comm.groups import Communicator
from ...topology.placement.identity import Identity, IdentityError, identify
from ..control.processes import die_with_parent
from ..rank.rank import choose_device, join_group, set_threads
from ..rank.shared_memory import require_shared_memory
from .answers import say


def _be_rank(identity: Identity, path: Path, work: Callable[[Any, Communicator], None]) -> None:
    deployment = deploy.from_json(json.loads(path.read_text()))
    require_shared_memory(identity, os.environ)
    from ...engine.step.build import build

    set_threads(deployment, identity)
    with join_group(deployment, identity) as communicator:
        built = build(deployment, communicator, choose_device(deployment, identity))
        gc.collect()
        gc.freeze()
        work(built, communicator)


def main(work: Callable[[Any, Communicator], None]) -> int:
    """Loads this rank's share of the deployment in argv[1] and calls `work`. Any exception ends the process at once."""
    die_with_parent()
    try:
        identity = identify()
        if identity is None:
            raise IdentityError("not a rank: `laddertron bench` and `verify` start this under a launcher")
        _be_rank(identity, Path(sys.argv[1]), work)
    except Refusal as refusal:
        say({"refused": str(refusal)})  # once, even if other ranks refuse it too
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    return 0
