"""Handwritten digits with a fully connected network, trained by Horovod on all ranks.

    horovodrun -np 2 python examples/digits.py              # gradients whole or as factors, whichever is smaller
    horovodrun -np 2 python examples/digits.py --horovod    # the same with Horovod alone, to compare
    python examples/digits.py                               # one process

The data (1797 images of 8 x 8 pixels) comes with scikit-learn: nothing is downloaded.
"""

import argparse
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--horovod", action="store_true", help="use horovod.torch instead of poseidon_hvd")
parser.add_argument("--epochs", type=int, default=20, help="passes over the training data (default: %(default)s)")
parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: %(default)s)")
parser.add_argument("--hidden", type=int, default=512, help="width of the two hidden layers (default: %(default)s)")
parser.add_argument("--lr", type=float, default=0.05, help="initial learning rate per rank (default: %(default)s)")
parser.add_argument("--momentum", type=float, default=0.9, help="of SGD (default: %(default)s)")
parser.add_argument("--seed", type=int, default=1, help="of split, weights and order of images (default: %(default)s)")
args = parser.parse_args()

if args.horovod:
    import horovod.torch as hvd
else:
    import poseidon_hvd as hvd  # the one line that changes


class Net(torch.nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.fc1 = torch.nn.Linear(64, hidden)
        self.fc2 = torch.nn.Linear(hidden, hidden)
        self.fc3 = torch.nn.Linear(hidden, 10)

    def forward(self, x):
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


def load_data(seed):
    """Training and test set, the same on every rank."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 8 - 1, labels, test_size=0.2, stratify=labels, random_state=seed)
    train_x, test_x, train_y, test_y = (torch.from_numpy(part) for part in split)
    return TensorDataset(train_x.float(), train_y), TensorDataset(test_x.float(), test_y)


def test_accuracy(model, dataset):
    """Share of right answers. Every rank answers for its part of the images."""
    images, labels = dataset[hvd.rank() :: hvd.size()]
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).sum()
    counts = hvd.allreduce(torch.stack([right, torch.tensor(len(labels))]), op=hvd.Sum, name="test_accuracy")
    return counts[0].item() / counts[1].item()


def train_epoch(model, loader, optimizer, bar):
    """Returns the mean loss of all ranks and the seconds of each step on this one."""
    loss_sum, seconds = 0.0, []
    for images, labels in loader:
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
        loss_sum += loss.item()
        bar.update()
    mean = hvd.allreduce(torch.tensor(loss_sum / len(loader)), name="loss")
    return mean.item(), seconds


def print_communication(optimizer):
    """What was sent for the gradients, and what plain Horovod would have sent."""
    if args.horovod:
        return
    print(f"\n{optimizer.scheme_report()}")
    schemes = optimizer.stats()["schemes"].values()
    sent, horovod = (sum(scheme[key] for scheme in schemes) / 1e6 for key in ("wire_bytes", "horovod_wire_bytes"))
    if horovod > 0:
        print(
            f"\ngradients sent by each rank: {sent:.2f} MB; plain Horovod: {horovod:.2f} MB, "
            f"{horovod / sent:.1f} times as much"
        )


def main():
    hvd.init()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the ranks of a host share its cores, and layers of this size gain nothing from more

    train_set, test_set = load_data(args.seed)
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    model = Net(args.hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

    seconds = []
    begin = time.perf_counter()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        # On stdout like everything else, so that horovodrun's prefix and the order of lines hold; narrow enough for
        # that prefix.
        with tqdm(
            total=len(loader),
            desc=f"epoch {epoch + 1:2}/{args.epochs}",
            disable=hvd.rank() != 0,
            file=sys.stdout,
            mininterval=0.5,
            ascii=".=",
            bar_format="{desc} [{bar:12}] {n_fmt:>3}/{total_fmt}{postfix}",
        ) as bar:
            loss, epoch_seconds = train_epoch(model, loader, optimizer, bar)
            scheduler.step()
            accuracy = test_accuracy(model, test_set)
            bar.set_postfix_str(f"loss {loss:.5f}  test accuracy {accuracy:.2%}", refresh=False)
        seconds += epoch_seconds
    total = time.perf_counter() - begin

    if hvd.rank() == 0:
        print_communication(optimizer)
        ranks = "1 rank" if hvd.size() == 1 else f"{hvd.size()} ranks"
        print(f"\ntrained in {total:.1f} s on {ranks}, {1e3 * statistics.median(seconds[1:]):.2f} ms per step (median)")
        print(f"test accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()
