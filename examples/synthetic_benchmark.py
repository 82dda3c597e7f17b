"""Images per second in training, on random pictures: what a network costs on these machines.

    horovodrun -np 2 python examples/synthetic_benchmark.py --model vgg16 --batch-size 8
    horovodrun -np 2 python examples/synthetic_benchmark.py --model vgg16 --batch-size 8 --horovod
    horovodrun -np 2 python examples/synthetic_benchmark.py --width 8 --image-size 32 --batch-size 4  # takes seconds

The first batches are not timed: poseidon_hvd chooses its schemes after the first one. Rates depend on everything that
runs beside, so the spread is printed too. How this project measures what it claims: docs/benchmarks.md.
"""

import argparse
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
parser.add_argument("--num-warmup-batches", type=int, default=10, help="that are not timed (default: %(default)s)")
parser.add_argument("--num-batches-per-iter", type=int, default=10, help="timed together (default: %(default)s)")
parser.add_argument("--num-iters", type=int, default=10, help="timings (default: %(default)s)")
parser.add_argument("--lr", type=float, default=0.01, help="learning rate (default: %(default)s)")
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients and factors in half precision")
parser.add_argument("--seed", type=int, default=42, help="of pictures and weights (default: %(default)s)")
args = parser.parse_args()

if args.horovod:
    import horovod.torch as hvd
else:
    import poseidon_hvd as hvd  # the one line that changes


def say(text):
    if hvd.rank() == 0:
        print(text, flush=True)


def main():
    hvd.init()
    torch.set_num_threads(max(1, torch.get_num_threads() // hvd.local_size()))  # the ranks of a host share its cores
    torch.manual_seed(args.seed + hvd.rank())  # every rank has pictures of its own; the weights are rank 0's

    model = NETWORKS[args.model](width=args.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    labels = torch.randint(1000, (args.batch_size,))

    def train(batches):
        """Always on the same images, so the loss falls. Returns this rank's last one."""
        loss = torch.tensor(float("nan"))
        for _ in range(batches):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        return loss.detach()

    say(
        f"{args.model} of width {args.width}, {args.batch_size} images of {args.image_size} x {args.image_size} "
        "per rank and step"
    )
    train(args.num_warmup_batches)
    rates = []
    for iteration in range(1, args.num_iters + 1):
        begin = time.perf_counter()
        loss = train(args.num_batches_per_iter)
        rates.append(args.batch_size * args.num_batches_per_iter / (time.perf_counter() - begin))
        say(
            f"iteration {iteration}: loss {hvd.allreduce(loss, name='loss').item():.6f}, "
            f"{rates[-1]:.1f} images/s per rank"
        )

    mean, spread = statistics.mean(rates), 1.96 * statistics.pstdev(rates)
    say(f"images/s per rank: {mean:.1f} +- {spread:.1f}")
    say(f"images/s on {hvd.size()} ranks: {hvd.size() * mean:.1f} +- {hvd.size() * spread:.1f}")
    if not args.horovod:
        say(optimizer.scheme_report().splitlines()[0])  # the others: a line per tensor


if __name__ == "__main__":
    main()
