"""The rows of docs/reliability.md.

Not every fault in every phase: only what ends in another way, or by another path through the code.
"""

import os
import time

from bench.cluster import Cluster
from harness.faults import GOES_ON, Row

# Whoever reads the error of a rank that is left learns which tensor or agreement it waited for in vain.
OTHERS = r"the others end, naming the (tensor|agreement)"
ALL = r"all end, naming the (tensor|agreement)"
STEPS = os.environ.get("POSEIDON_FAULT_STEPS", "20000")  # 100000 by hand: ten minutes


def cut_for(seconds: float):
    def act(cluster: Cluster) -> None:
        cluster.cut("host1")
        time.sleep(seconds)
        cluster.restore("host1")

    return act


def differ(case: str, ours: str, **options) -> Row:
    """Ranks differ from the start; with plain Horovod some wait for ever, which is told after the limit."""
    fault = f"ranks differ: {case.replace('-', ' ')}"
    return Row(fault, "agreement", ours, script="ranks_differ.py", arguments=(case,), limit=30, **options)


def endure(fault: str, what: str, count: str, **options) -> Row:
    return Row(fault, "all", GOES_ON, script="endurance.py", arguments=(what, count), longest=600, **options)


ROWS: list[Row] = [
    # A connection that breaks without a word, in every phase: what is in flight, and so who notices, differs.
    Row("killed", "start", OTHERS),
    Row("killed", "agreement", OTHERS, smoke=True),
    Row("killed", "backward", OTHERS),
    Row("killed", "waiting", OTHERS, smoke=True),
    Row("killed", "between", OTHERS),
    Row("killed", "plan", OTHERS),
    Row("killed", "backward", OTHERS, ranks=4),
    Row("segmentation-fault", "backward", OTHERS),
    # The same for the network, with the failed rank's threads and output cut off too.
    Row("os._exit", "backward", OTHERS),
    # Horovod says farewell for the rank, so that the others see a shutdown and no broken connection.
    Row("raises", "start", ALL),
    Row("raises", "agreement", ALL),
    Row("raises", "backward", ALL, smoke=True),
    Row("raises", "backward", ALL, ranks=4),
    Row("raises", "plan", ALL),
    Row("sys.exit", "between", OTHERS),
    Row("ends-early", "between", OTHERS),
    # Signals arrive while the rank waits in C++; Python's handler runs when that returns.
    Row("SIGINT", "waiting", ALL),
    Row("SIGTERM", "waiting", OTHERS),
    # Below gloo's timeout of 30 s nobody notices, above it the others give up.
    Row("stopped-20s", "waiting", GOES_ON, longest=40),
    Row("stopped-45s", "waiting", OTHERS, longest=60, limit=90),
    Row("slowed", "between", GOES_ON),
    Row("network-cut-5s", "between", GOES_ON, arguments=("network", "between"), act=cut_for(5), longest=40),
    Row(
        "network-cut-45s",
        "between",
        ".*end.*, naming the (tensor|agreement)",
        arguments=("network", "between"),
        act=cut_for(45),
        longest=90,
        limit=120,
    ),
    Row(
        "network-100-times-slower",
        "between",
        GOES_ON,
        arguments=("network", "between"),
        act=lambda cluster: cluster.set_rate("10mbit"),
    ),
    # The step's 8,000 rows take a while.
    Row("out-of-memory", "backward", "all end, naming the tensor", longest=40),
    Row("out-of-memory", "plan", "all end, naming the tensor", longest=40, smoke=True),
    differ("shape", "all end, naming the tensor and the rank", smoke=True),
    differ("fewer-layers", "all end, naming .*the rank"),
    differ("dtype", "all end, naming the tensor and the rank"),
    differ("order", GOES_ON),  # parameters are told by their names
    differ("names", "all end, naming .*the rank"),
    differ("policy", "all end, naming .*the rank"),
    differ("op", "all end, naming .*the rank"),
    differ("requires-grad", "all end, naming the tensor and the rank"),
    differ("sparse", "all end, naming the tensor and the rank"),
    differ("unfreezing", "all end, naming the tensor and the rank"),  # of a layer, after a few steps
    Row("NaN", "backward", GOES_ON),
    Row("Inf", "backward", GOES_ON, smoke=True),
    Row("caught", "backward", GOES_ON),
    Row("forks", "between", GOES_ON),
    Row("ends-in-flight", "backward", GOES_ON),
    # The joined rank answers a gather with something else: Horovod notices at once, or gloo after 30 s.
    Row("joins-early", "between", "all end, naming the tensor", longest=45, limit=60),
    Row(
        "joins-early, uneven_steps",
        "between",
        GOES_ON,
        arguments=("joins-early", "between"),
        env={"POSEIDON_UNEVEN_STEPS": "1"},
    ),
    Row("on-a-thread", "all", GOES_ON),
    Row("elastic: dies and returns", "backward", GOES_ON, script="elastic.py", limit=300, longest=240),
    endure("init and shutdown, 50 times", "restarts", "50", limit=180),
    endure("1,000 optimizers", "wraps", "1000", limit=120),
    endure(f"{int(STEPS):,} steps", "steps", STEPS, limit=1500, env={"HOROVOD_CYCLE_TIME": "0.2"}),
]
