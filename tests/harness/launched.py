"""What a rank tells of how it was launched: where it is, what reached it, and that both libraries train there alike."""

import hashlib
import os
import socket
from typing import Any

# What a launch may hand to its ranks: settings of the libraries, and whatever else the caller has exported.
_PREFIXES = ("HOROVOD_", "POSEIDON_", "NOTE_")


def report(steps: int = 3) -> dict[str, Any]:
    """Initializes Horovod, trains a small model with either library and returns what the launcher's tests compare,
    as plain data.
    """
    import horovod.torch as horovod
    import torch

    import poseidon_hvd as hvd

    horovod.init()
    torch.set_num_threads(1)

    def trained(library):
        torch.manual_seed(7)
        model = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
        optimizer = library.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model.named_parameters()
        )
        for step in range(steps):
            generator = torch.Generator().manual_seed(1000 * step + library.rank())
            optimizer.zero_grad()
            model(torch.randn(6, 12, generator=generator)).tanh().pow(2).mean().backward()
            optimizer.step()
        return optimizer, torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    _, theirs = trained(horovod)
    optimizer, ours = trained(hvd)
    plan = optimizer.plan()
    return {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "local": [hvd.local_rank(), hvd.local_size()],
        "cross": [hvd.cross_rank(), hvd.cross_size()],
        "host": socket.gethostname(),
        "environment": {key: value for key, value in os.environ.items() if key.startswith(_PREFIXES)},
        "schemes": {t["name"]: t["scheme"] for t in plan["tensors"]} if plan is not None else {},
        "parameters": hashlib.sha256(ours.numpy().tobytes()).hexdigest(),
        "difference": ((ours - theirs).norm() / theirs.norm()).item(),
    }
