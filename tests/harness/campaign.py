"""Runs cases on a number of real ranks and tells how each ended."""

import dataclasses
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from .launch import Launched, launch
from .registry import find

# A failed case costs a new launch. After so many, or so long, something is broken for all.
MAX_LAUNCHES = 8
MAX_SECONDS = 800.0
_START_SECONDS = 60.0
# A rank that is stuck in a case ends itself; this ends a launch in which that did not happen.
_MOST_SECONDS = 900.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    passed: bool
    text: str


class _Journals:
    """The events of all ranks of one launch."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.events: list[list[dict]] = []
        self.stacks: list[str] = []
        for rank in range(ranks):
            lines = _read(folder / f"rank{rank}.jsonl").splitlines()
            self.events.append([json.loads(line) for line in lines if line.endswith("}")])
            self.stacks.append(_read(folder / f"rank{rank}.stacks"))

    def of(self, rank: int, case: str) -> Optional[dict]:
        """The last event of a case on a rank."""
        return next((e for e in reversed(self.events[rank]) if e.get("case") == case), None)

    def where(self) -> str:
        """In which case each rank was at the end."""
        lines = []
        for rank, events in enumerate(self.events):
            last = events[-1] if events else {"event": "not started"}
            lines.append(f"rank {rank}: {last['event']} {last.get('case', '')}".rstrip())
        return "; ".join(lines)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def run_cases(ranks: int, names: Sequence[str]) -> dict[str, Outcome]:
    """Every case of ``names`` (``"module.name"``) gets an outcome; one that did not run has failed."""
    outcomes: dict[str, Outcome] = {}
    last = ""
    begin = time.monotonic()
    for _ in range(MAX_LAUNCHES):
        todo = [name for name in names if name not in outcomes]
        if not todo:
            return outcomes
        if time.monotonic() - begin > MAX_SECONDS:
            break
        with tempfile.TemporaryDirectory(prefix="poseidon-test-") as temporary:
            folder = Path(temporary)
            (folder / "plan.json").write_text(json.dumps({"ranks": ranks, "cases": todo}))
            seconds = min(_START_SECONDS + max(find(name).seconds for name in todo) + 10.0 * len(todo), _MOST_SECONDS)
            launched = launch(
                ranks,
                [str(Path(__file__).with_name("worker.py")), str(folder)],
                seconds=seconds,
                env={"HOROVOD_LOG_LEVEL": "error"},
            )
            journals = _Journals(folder, ranks)
        last = _collect(launched, journals, todo, outcomes)
    for name in names:
        outcomes.setdefault(name, Outcome(False, f"not run: too many launches ended early. The last one:\n{last}"))
    return outcomes


def _collect(launched: Launched, journals: _Journals, todo: Sequence[str], outcomes: dict[str, Outcome]) -> str:
    """Outcomes of the cases that all ranks ended, and of the one at which the launch broke off.

    The others stay open.
    """
    ranks = range(len(journals.events))
    for name in todo:
        ends = [journals.of(rank, name) for rank in ranks]
        if all(e is not None and e["event"] == "pass" for e in ends):
            outcomes[name] = Outcome(True, "")
            continue
        # Everything before passed, so the launch broke off here.
        parts = []
        for rank, end in zip(ranks, ends):
            if end is None:
                parts.append(f"---- rank {rank} did not get here")
            elif end["event"] == "pass":
                parts.append(f"---- rank {rank} passed")
            elif end["event"] == "fail":
                parts.append(f"---- rank {rank}\n{end['traceback']}")
            else:
                parts.append(f"---- rank {rank} did not come back. Its stacks:\n{journals.stacks[rank]}")
        text = f"{name}: {journals.where()}\n" + "\n".join(parts) + f"\n---- {launched}"
        outcomes[name] = Outcome(False, text)
        return text
    # All passed; the end of the processes belongs to the last case.
    if launched.returncode != 0 or launched.orphans:
        outcomes[todo[-1]] = Outcome(
            False, f"all cases passed, but the ranks did not end well. Orphans: {launched.orphans}\n{launched}"
        )
    return str(launched)
