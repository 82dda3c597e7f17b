"""Images per second while ranks come and go: training that survives the loss of one (Horovod's elastic mode).

    horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh \\
        python examples/elastic_synthetic_benchmark.py
    horovodrun -np 2 python examples/elastic_synthetic_benchmark.py --width 8 --image-size 32 --batch-size 4

hosts.sh prints the hosts that there are now, one "name:slots" a line. When a rank is lost, the others go back to what
was last committed, form a new ring and go on; when hosts appear, they get rank 0's state and take part. With all ranks
on one machine horovodrun needs --network-interface lo besides.
"""

import argparse
import os
import statistics
import time

import torch
import torch.nn.functional as F
from networks import NETWORKS

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--horovod", action="store_true", help="use horovod.torch instead of poseidon_hvd")
parser.add_argument("--model", choices=NETWORKS, default="resnet50", help="what to train (default: %(default)s)")
parser.add_argument(
    "--width", type=int, default=64, help="channels of its first layer; 64 is the published size (default: %(default)s)"
)
parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: %(default)s)")
parser.add_argument("--image-size", type=int, default=224, help="side in pixels, at least 32 (default: %(default)s)")
parser.add_argument("--num-batches-per-iter", type=int, default=10, help="timed together (default: %(default)s)")
parser.add_argument("--num-iters", type=int, default=10, help="timings (default: %(default)s)")
parser.add_argument(
    "--iters-per-commit", type=int, default=1, help="a commit copies model and optimizer (default: %(default)s)"
)
parser.add_argument("--lr", type=float, default=0.01, help="learning rate per rank (default: %(default)s)")
parser.add_argument(
    "--lose-rank-at",
    type=int,
    metavar="N",
    default=0,
    help="the last rank dies in iteration N; with fixed ranks it only looks so",
)
parser.add_argument("--seed", type=int, default=42, help="of pictures and weights (default: %(default)s)")
args = parser.parse_args()

if args.horovod:
    import horovod.torch as hvd
else:
    import poseidon_hvd as hvd  # the one line that changes


def say(text):
    if hvd.rank() == 0:
        print(text, flush=True)


def make_batch():
    """This rank's pictures, always the same ones, so the loss falls."""
    generator = torch.Generator().manual_seed(args.seed + hvd.rank())
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, generator=generator)
    return images, torch.randint(1000, (args.batch_size,), generator=generator)


def lose_rank():
    """In elastic mode the last rank ends.

    With fixed ranks that would be the end of the job, so all of them see what others would.
    """
    if os.environ.get("HOROVOD_ELASTIC") != "1":
        raise hvd.HorovodInternalError("a rank is lost (--lose-rank-at)")
    if hvd.rank() == hvd.size() - 1:
        os._exit(1)


@hvd.elastic.run
def benchmark(state):
    """Starts again here, from the committed state, whenever ranks have come or gone.

    No collectives before the first one of a step.
    """
    images, labels = make_batch()
    while state.iteration < args.num_iters:
        failing = state.iteration + 1 == args.lose_rank_at
        if failing:
            args.lose_rank_at = 0  # once
        begin = time.perf_counter()
        for _ in range(args.num_batches_per_iter):
            state.optimizer.zero_grad()
            loss = F.cross_entropy(state.model(images), labels)
            loss.backward()
            if failing:
                lose_rank()
            state.optimizer.step()
        rate = args.batch_size * args.num_batches_per_iter / (time.perf_counter() - begin)
        state.iteration += 1
        state.rates = [*state.rates, rate]  # a new list: the committed one must not change
        say(
            f"iteration {state.iteration}: loss {hvd.allreduce(loss.detach(), name='loss').item():.6f}, "
            f"{rate:.1f} images/s per rank on {hvd.size()} ranks"
        )
        if state.iteration % args.iters_per_commit == 0:
            state.commit()


def main():
    hvd.init()
    torch.set_num_threads(max(1, torch.get_num_threads() // hvd.local_size()))  # the ranks of a host share its cores
    torch.manual_seed(args.seed + hvd.rank())

    model = NETWORKS[args.model](width=args.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def scale_learning_rate():
        for group in optimizer.param_groups:
            group["lr"] = args.lr * hvd.size()

    # Its first synchronization gives all ranks the state of rank 0: no broadcasts of our own.
    state = hvd.elastic.TorchState(model, optimizer, iteration=0, rates=[])
    state.register_reset_callbacks([scale_learning_rate])
    benchmark(state)

    spread = 1.96 * statistics.pstdev(state.rates)
    say(f"images/s per rank: {statistics.mean(state.rates):.1f} +- {spread:.1f}")
    if not args.horovod:
        say(optimizer.scheme_report().splitlines()[0])  # the others: a line per tensor


if __name__ == "__main__":
    main()
