"""Which tests ``make test`` leaves out, and which of each group it keeps as a smoke test. ``make test-all`` runs all.

A test is slow if a pattern of its module matches its name, or if it uses one of the fixtures, which launch ranks or
make a cluster. CONTRIBUTING.md has a table of what takes how long.
"""

import dataclasses
import re
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Group:
    """Of one module. ``slow``, ``smoke``: patterns of test names, parameters included."""

    smoke: str
    slow: str = "$^"
    fixtures: frozenset[str] = frozenset()


_CLUSTER = frozenset({"cluster", "machine"})
GROUPS = {
    # Every case on two ranks that are threads; the other numbers, and launches, by the plainest cases.
    "test_exchange": Group(
        slow=r"test_threads\[(3|4|8)-|test_ranks",
        smoke=r"test_threads\[(3|4|8)-linear-|test_ranks\[2-(linear|embedding)-",
    ),
    "test_examples": Group(
        slow=r"test_(?!one_import)", smoke=r"test_(every_epoch|output_is_no_flood|hidden_layers|sends_what)"
    ),
    "test_bench_train": Group(fixtures=frozenset({"mlp", "transformer"}), smoke=r"test_models_have"),
    "test_bench_dense": Group(
        slow=r"test_one_rank_exchanges", fixtures=frozenset({"mlp", "memory"}), smoke=r"test_one_rank_exchanges.*dense"
    ),
    "test_bench_selector": Group(fixtures=frozenset({"small"}), smoke=r"test_bytes_of_a_cell"),
    "test_bench_replay": Group(slow=r"test_smoke$", smoke=r"test_schedule_covers"),
    "test_launchers": Group(slow=r"test_(?!a_missing_launcher)", smoke=r"test_hosts_on_the_command_line$"),
    "test_elastic": Group(slow=r"test_", smoke=r"test_another_takes_the_place"),
    "test_faults": Group(slow=r"test_", smoke=r"test_fault\[killed-waiting"),
    "test_cluster": Group(fixtures=_CLUSTER, smoke=r"test_unmodified_horovodrun"),
    "test_wire_bytes": Group(slow=r"test_.*\[(allreduce|sfb)\]", smoke=r"test_(engine|interface)_counters.*\[bytes\]"),
    "test_drop_in": Group(slow=r"test_", smoke=r"test_same_loss_curve\[package\]"),
    "test_timeline": Group(slow=r"test_", smoke=r"test_messages.*\[lazy"),
}


def is_slow(module: str, name: str, fixtures: Iterable[str]) -> bool:
    """``name``: with parameters, as in ``test_threads[2-linear-one_row]``."""
    group = GROUPS.get(module)
    if group is None or re.match(group.smoke, name):
        return False
    return re.match(group.slow, name) is not None or not group.fixtures.isdisjoint(fixtures)
