"""A virtual cluster: N hosts on one machine, joined by links of a chosen bandwidth.

Importing this package needs nothing beyond the standard library, so that a rank can read its counters
(``bench.cluster.counters``) on any machine. Making a cluster needs root; ask ``available()`` first. See
docs/cluster.md.
"""

from bench.cluster.cluster import Cluster
from bench.cluster.errors import ClusterError, RunTimeout
from bench.cluster.requirements import available

__all__ = ["Cluster", "ClusterError", "RunTimeout", "available"]
