"""What each rank of a launch runs: ``worker.py FOLDER``, with the cases to run in ``FOLDER/plan.json``.

Writes one JSON line per event to ``FOLDER/rank<r>.jsonl``. A failed case ends the launch, because its ranks may have
parted: the launcher runs the remaining cases in a new one. So nothing that runs after a failure can pass by accident,
    and nothing is lost.
"""

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path

FAILED_CODE = 17
# How long a rank may still take for the case that failed on another one: its own traceback says more than "killed".
GRACE_SECONDS = 6.0


class Journal:
    """This rank's file of events, and a look at the others'."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self._folder, self._rank, self._size = folder, rank, size
        self._file = open(folder / f"rank{rank}.jsonl", "a")  # noqa: SIM115 (open as long as the rank)
        self.stacks = open(folder / f"rank{rank}.stacks", "a+")  # noqa: SIM115

    def write(self, **event) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()

    def ended(self, case: str) -> int:
        """Ranks that have ended the case."""
        return sum((self._folder / f"ended.{case}.{rank}").exists() for rank in range(self._size))

    def end(self, case: str) -> None:
        (self._folder / f"ended.{case}.{self._rank}").touch()

    def failed(self) -> bool:
        return (self._folder / "failed").exists()

    def fail(self) -> None:
        (self._folder / "failed").touch()


def _leave_when_another_failed(journal: Journal) -> None:
    while not journal.failed():
        time.sleep(0.1)
    time.sleep(GRACE_SECONDS)
    faulthandler.dump_traceback(journal.stacks, all_threads=True)
    os._exit(FAILED_CODE)


def main() -> None:
    folder = Path(sys.argv[1])
    plan = json.loads((folder / "plan.json").read_text())

    import torch

    from harness.ranks import Rank
    from harness.registry import find

    torch.set_num_threads(1)
    rank = Rank.start(plan["ranks"])
    journal = Journal(folder, rank.rank, rank.size)
    threading.Thread(target=_leave_when_another_failed, args=(journal,), name="watch-others", daemon=True).start()
    journal.write(event="ready")
    for index, name in enumerate(plan["cases"]):
        case = find(name)
        journal.write(event="start", case=name)
        # Needs no GIL, so it also ends a rank that is stuck in C++.
        faulthandler.dump_traceback_later(case.seconds, exit=True, file=journal.stacks)
        begin = time.monotonic()
        error = None
        try:
            rank.begin_case()
            case.run(rank)
            rank.end_case(index)
        except BaseException:  # SystemExit, KeyboardInterrupt: also a failure of the case
            error = traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        journal.write(event="fail" if error else "pass", case=name, traceback=error, seconds=time.monotonic() - begin)
        journal.end(name)
        if error:
            journal.fail()
            deadline = time.monotonic() + GRACE_SECONDS
            while journal.ended(name) < rank.size and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.5)  # the others' lines reach their files
            os._exit(FAILED_CODE)
    journal.write(event="done")
    # Ends as a script would: exit handlers of Horovod and of the engine must not hang either.


if __name__ == "__main__":
    main()
