"""One rank of a replay: ``python -m bench.replay.worker FOLDER`` under horovodrun; ``bench.replay`` starts it.

FOLDER/spec.json says what to do, FOLDER/result.json is what rank 0 leaves. All ranks run on one machine and share its
monotonic clock, so the time of a step is exact: from the moment the last rank ended the step before to the moment the
last rank ends this one.
"""

import gc
import json
import os
import pathlib
import sys
import time
from typing import Any, Optional

import horovod.torch as horovod
import torch

import poseidon_hvd as hvd
from bench.cluster.counters import read_local
from bench.replay import networks
from bench.replay.model import Clock, Replay, sleep_until
from bench.replay.schedule import Scale, rebuild_seconds, scaled_layers, schedule
from bench.replay.timeline import tails

CHARGED = "-charged"
_START_SECONDS = 0.3  # from the agreement on a start to the start
_SHAPED_SECONDS = 60.0


class Runner:
    """A system with its own clock, and what was measured of it on this rank."""

    def __init__(self, name: str, model: Replay, scale: Scale, folder: pathlib.Path) -> None:
        self.name = name
        self.clock = model.clock
        self.model = model
        self.optimizer: Any = None
        self._forward: Any = model
        if name == "ddp":
            self._forward = _ddp(model, scale, folder)
        elif name != "none":
            distributed, options = (
                (horovod, {}) if name == "horovod" else (hvd, {"policy": name.removesuffix(CHARGED).split("-")[1]})
            )
            sgd = torch.optim.SGD(model.parameters(), lr=0.0)
            self.optimizer = distributed.DistributedOptimizer(sgd, model.named_parameters(), **options)
        self.blocks: list[dict[str, Any]] = []

    def stats(self) -> Optional[dict[str, Any]]:
        return self.optimizer.stats() if hasattr(self.optimizer, "stats") else None

    def step(self) -> None:
        """Forward, backward, and whatever makes ``.grad`` the mean over ranks; the parameters do not move."""
        self.forget()
        self._forward().backward()
        if self.optimizer is not None:
            self.optimizer.synchronize()

    def warm_up(self, steps: int) -> None:
        self.clock.hurry = True
        for _ in range(steps):
            self.step()
        if self.name != "none":
            wrong = hvd.allgather_object(list(self.model.wrong_gradients(hvd.size())), name=f"replay.check.{self.name}")
            for rank, messages in enumerate(wrong):
                if messages:
                    raise SystemExit(
                        f"{self.name}, rank {rank}: wrong gradients, nothing is timed: {'; '.join(messages[:5])}"
                    )
        self.clock.hurry = False
        self.forget()

    def block(self, steps: int) -> None:
        """Steps back to back, as in training, after a common start."""
        gc.collect()
        hvd.barrier()
        start = hvd.broadcast_object(time.monotonic() + _START_SECONDS, root_rank=0, name=f"replay.start.{self.name}")
        sleep_until(start)
        before, sent = self.stats(), read_local()
        ends, late, backward_ends = [start], [], []
        for _ in range(steps):
            self.step()
            ends.append(time.monotonic())
            late.append(self.clock.late_seconds)
            backward_ends.append(self.clock.backward_ended)
        now = read_local()
        hvd.barrier()
        self.blocks.append(
            {
                "ends": ends,
                "late": late,
                "backward_ends": backward_ends,
                "sent": now[0] - sent[0] if now and sent else None,
                "before": before,
                "after": self.stats(),
            }
        )
        self.forget()

    def forget(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def charge_rebuild(self, network: networks.Network, scale: Scale) -> None:
        """From now on the layers sent as factors take longer by what rebuilding would take the published processor."""
        layers, extra = network.layers(), {}
        for tensor in self.optimizer.plan()["tensors"]:
            if tensor["scheme"] == "sfb" and tensor["name"].endswith(".weight"):
                index = int(tensor["name"].split(".")[1])
                extra[index] = rebuild_seconds(network, layers[index], hvd.size())
        self.clock.schedule = schedule(network, scale, extra)


def _ddp(model: Replay, scale: Scale, folder: pathlib.Path) -> torch.nn.Module:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder / 'ddp'}", rank=hvd.rank(), world_size=hvd.size()
        )
    # Parameters are zeros everywhere: nothing to broadcast.
    return torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=scale.ddp_bucket_mb, init_sync=False)


def run(spec: dict[str, Any], folder: pathlib.Path) -> None:
    network, scale = networks.get(spec["network"]), Scale(spec["size"], spec["dilation"])
    plan = schedule(network, scale)
    first = Replay(scaled_layers(network, scale), Clock(plan), hvd.rank())
    runners = []
    for name in spec["systems"]:
        runner = Runner(name, first if not runners else first.sharing(Clock(plan)), scale, folder)
        runner.warm_up(3)  # ours observes in the first, DDP fills its buckets anew in the second
        if name.endswith(CHARGED):
            runner.charge_rebuild(network, scale)
        runners.append(runner)
    _wait_until_shaped(folder)
    loads = [os.getloadavg()[0]]
    for _ in range(spec["rounds"]):
        for runner in runners:
            runner.block(spec["steps"])
    loads.append(os.getloadavg()[0])
    timelines = {
        runner.name: _timeline(runner, spec["steps"], folder)
        for runner in runners
        if spec["timeline"] and runner.name.startswith("poseidon")
    }
    gathered = hvd.allgather_object({runner.name: runner.blocks for runner in runners}, name="replay.blocks")
    if hvd.rank() == 0:
        result = {
            "schedule_seconds": {r.name: r.clock.schedule.step_seconds for r in runners},
            "blocks": {r.name: [ranks[r.name] for ranks in gathered] for r in runners},
            "schemes": {r.name: r.optimizer.scheme_report() for r in runners if hasattr(r.optimizer, "scheme_report")},
            "tails": {name: tails(*timeline, scale.dilation) for name, timeline in timelines.items()},
            "load_averages": loads,
            "horovod_environment": {
                k: v for k, v in os.environ.items() if k in scale.environment() or k == "OMP_NUM_THREADS"
            },
        }
        (folder / "result.json").write_text(json.dumps(result))


def _timeline(runner: Runner, steps: int, folder: pathlib.Path) -> tuple:
    """Some more steps, which count for nothing, under Horovod's timeline: its path, and when backward passes and
    steps ended here.
    """
    path = folder / f"timeline-{runner.name}.json"
    epoch = time.time() - time.monotonic()
    hvd.start_timeline(str(path))
    runner.block(steps)
    block = runner.blocks.pop()
    hvd.stop_timeline()
    time.sleep(1.0)  # its writer is a thread of its own
    return path, [epoch + end for end in block["backward_ends"]], [epoch + end for end in block["ends"][1:]]


def _wait_until_shaped(folder: pathlib.Path) -> None:
    """Warming up ran at full speed.

    Now the links get their rate: whoever started us sees the one file and makes the other.
    """
    hvd.barrier()
    if hvd.rank() == 0:
        (folder / "warm").touch()
        deadline = time.monotonic() + _SHAPED_SECONDS
        while not (folder / "shaped").exists():
            if time.monotonic() > deadline:
                raise SystemExit(f"the links were not shaped within {_SHAPED_SECONDS:.0f} s")
            time.sleep(0.05)
    hvd.barrier()


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    torch.set_num_threads(1)
    hvd.init()
    run(json.loads((folder / "spec.json").read_text()), folder)
    hvd.barrier()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
