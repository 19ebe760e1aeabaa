"""`python -m laddertron.launchers.measure.verify_rank DEPLOYMENT.json ORDER`: a rank of `laddertron verify`.
ORDER is JSON: requests, longest, cases, seed, digests. Rank 0 prints JSON lines: what it is, each case with its first
difference on any rank, and the digests of the requests computed alone if wanted.
"""

from __future__ import annotations

import json
import random
import sys
from itertools import chain
from typing import Any

from ...engine.step.row_check import RowCheck
from ...topology.comm.groups import Communicator
from .answers import say
from .rank_work import main


def verify(built: Any, communicator: Communicator) -> None:
    order = json.loads(sys.argv[2])
    longest, limits = order["longest"], built.limits
    if longest > min(limits.max_model_len, limits.kv_tokens):
        raise ValueError(
            f"--longest {longest} is more than max_model_len={limits.max_model_len} or the {limits.kv_tokens} tokens "
            "of the KV cache: use less"
        )
    dice = random.Random(order["seed"])
    lengths = [longest, *(dice.randint(1, longest) for _ in range(order["requests"] - 1))]
    check = RowCheck(built.runner, [[dice.randrange(limits.vocab_size) for _ in range(n)] for n in lengths])
    if communicator.leads:
        say({"ready": True})
    for difference in check.run(order["cases"], order["seed"]):
        first_difference = _first("" if difference is None else str(difference), communicator)
        if communicator.leads:
            say({"difference": first_difference})
    if order["digests"]:
        digests = [check.digests(request) for request in range(len(lengths))]
        everyone = communicator.collect(json.dumps(digests).encode())
        if communicator.leads:  # one rank of each stage speaks for it
            stages = [json.loads(text) for text in everyone[:: communicator.size]]
            say({"digests": [[*chain(*parts)] for parts in zip(*stages, strict=True)]})


def _first(text: str, communicator: Communicator) -> str:
    """The first message of the ranks that is not empty; messages of ranks other than 0 have the rank's number."""
    for rank, words in enumerate(communicator.collect(text.encode())):
        if message := words.decode():
            return message if rank == 0 else f"{message}, on rank {rank}"
    return ""


if __name__ == "__main__":
    sys.exit(main(verify))
