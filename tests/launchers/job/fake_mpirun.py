"""Stands for mpirun in tests without MPI: starts the ranks as Open MPI would (own process groups, the same variables),
passes SIGTERM on, and ends all when one fails. `fake_mpirun.py N -- command ...`; the pids go to $FAKE_PIDS."""

from __future__ import annotations

import os
import signal
import subprocess
import sys


def main() -> int:
    count, command = int(sys.argv[1]), sys.argv[3:]
    ranks = [
        subprocess.Popen(
            command,
            env={
                **os.environ,
                "OMPI_COMM_WORLD_SIZE": str(count),
                "OMPI_COMM_WORLD_RANK": str(rank),
                "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            },
            process_group=0,
        )
        for rank in range(count)
    ]

    def end(*_: object) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    worst = 0
    for _ in ranks:
        pid, status = os.wait()
        for rank in ranks:
            if rank.pid == pid:
                rank.returncode = os.waitstatus_to_exitcode(status)
        code = os.waitstatus_to_exitcode(status)
        if code != 0 and worst == 0:
            number = next(index for index, rank in enumerate(ranks) if rank.pid == pid)
            print(f"fake mpirun: rank {number} with PID {pid} ended with {code}", flush=True)
            worst = code if code > 0 else 128 - code
            end()
    return worst


if __name__ == "__main__":
    sys.exit(main())
