"""What becomes of a launch in which something goes wrong, in a few words and in seconds, with either library."""

import dataclasses
import re
import threading
import time
from pathlib import Path
from typing import Any, Callable, Optional

from bench.cluster import Cluster, RunTimeout
from harness.elastic import launch_elastic
from harness.launch import START_SECONDS, TESTS, Launched, environment, launch

LIBRARIES = ("poseidon_hvd", "horovod.torch")

GOES_ON = "all go on"
HANGS = "hangs"
BY_LAUNCHER = "the launcher ends the others"


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        fault: as the table names it, and as the script knows it where ``arguments`` do not say otherwise.
        phase: when.
        ours: the outcome expected with poseidon_hvd; a pattern that must match all of it.
        ranks: how many.
        script: of tests/scripts; launched with the library and ``arguments``.
        arguments: by default fault and phase.
        limit: seconds from the fault after which the launch counts as hanging, with either library.
        longest: seconds that the outcome may take, where it is not compared with Horovod's.
        env: variables of the ranks.
        act: on the virtual cluster, where there is one: what is done to it when rank 1 says so.
        smoke: part of the ordinary tests.
    """

    fault: str
    phase: str
    ours: str
    ranks: int = 2
    script: str = "fault.py"
    arguments: Optional[tuple[str, ...]] = None
    limit: float = 45
    longest: float = 20
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    act: Optional[Callable[[Cluster], None]] = None
    smoke: bool = False

    @property
    def name(self) -> str:
        return re.sub(r"[^\w.]+", "-", f"{self.fault}-{self.phase}-{self.ranks}")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        words: for the table.
        seconds: from the fault to the end of the launch; its limit if it had to be killed.
        messages: what each rank ended with.
    """

    words: str
    seconds: float
    messages: dict[str, str]

    def plain(self) -> dict[str, Any]:
        return {"outcome": self.words, "seconds": round(self.seconds, 1), "messages": self.messages}


def run(row: Row, library: str, folder: Path) -> tuple[Outcome, Launched]:
    """Launches one row with one library."""
    arguments = [str(TESTS / "scripts" / row.script), library, *(row.arguments or (row.fault, row.phase))]
    if row.script == "elastic.py":
        launched = launch_elastic(folder, library, limit=row.limit)
    elif row.act is not None:
        launched = _on_cluster(row, arguments, folder)
    else:
        launched = launch(row.ranks, arguments, seconds=row.limit, env=row.env, after=" struck @")
    return outcome_of(launched, row.ranks, row.limit), launched


def outcome_of(launched: Launched, ranks: int, limit: float) -> Outcome:
    """Reads what the ranks have said: "struck", "ends with KIND: MESSAGE", "reached the end", each with its time."""
    said = re.findall(r"rank (\d+) (struck|ends with .*|reached the end) @(\d+\.\d+)", launched.output)
    struck = [float(when) for _, what, when in said if what == "struck"]
    messages = {rank: what[len("ends with ") :] for rank, what, _ in said if what.startswith("ends with")}
    reached = {rank for rank, what, _ in said if what == "reached the end"}
    if launched.timed_out:
        assert struck, f"the fault never came\n{launched}"
        return Outcome(HANGS, limit, messages)
    ended = max([launched.ended, *(float(when) for _, _, when in said)])  # the launcher may go first
    seconds = ended - min(struck) if struck else launched.seconds
    others = [str(rank) for rank in range(ranks) if rank != 1]
    if launched.returncode == 0 and (len(reached) == ranks or not said):  # the elastic script says nothing
        return Outcome(GOES_ON, seconds, messages)
    if not all(rank in messages for rank in others):
        return Outcome(GOES_ON if reached >= set(others) else BY_LAUNCHER, seconds, messages)
    who = "all end" if "1" in messages else "the others end"
    return Outcome(f"{who}, naming {_named(messages[others[0]])}", seconds, messages)


def _named(message: str) -> str:
    """What a user learns from an error."""
    text = re.sub(r"^\w+: (\[rank \d+\] )?", "", message)
    found: list[str] = []
    if re.search(r"(\w+\.)+(weight|bias)\b", text):
        found.append("the tensor")
    if "agree." in text and not found:
        found.append("the agreement")
    if re.search(r"\branks? \d", text, re.IGNORECASE):
        found.append("the rank")
    if "out of memory" in text:
        found.append("memory")
    return " and ".join(found) or "nothing"


def _on_cluster(row: Row, arguments: list[str], folder: Path) -> Launched:
    """One rank on each of two hosts with links of 1 Gbit/s."""
    notes = folder / "notes"
    notes.unlink(missing_ok=True)
    begin = time.monotonic()
    with Cluster(hosts=row.ranks, rate="1gbit") as cluster:
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.05):
                if notes.exists():
                    row.act(cluster)
                    return

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            env = {**environment(row.env), "FAULT_NOTES": str(notes)}
            done = cluster.run(["python", *arguments], timeout=row.limit + START_SECONDS, env=env)
            code, output = done.returncode, done.stdout
        except RunTimeout as timeout:
            code, output = None, str(timeout)
        finally:
            end = time.time()
            ended.set()
            watcher.join()
    return Launched(code, output, time.monotonic() - begin, end, [])
