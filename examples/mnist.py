"""A small convolutional network on handwritten digits, the script that most people first run on several ranks.

    horovodrun -np 2 python examples/mnist.py
    horovodrun -np 2 python examples/mnist.py --horovod     # with Horovod alone: the same losses

Each rank trains on its share of the images, rank 0 saves the model. The images are scikit-learn's digits, enlarged to
MNIST's 28 x 28 pixels, so nothing is downloaded.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--horovod", action="store_true", help="use horovod.torch instead of poseidon_hvd")
parser.add_argument("--epochs", type=int, default=10, help="passes over the training images (default: %(default)s)")
parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: %(default)s)")
parser.add_argument("--lr", type=float, default=0.03, help="learning rate per rank (default: %(default)s)")
parser.add_argument("--momentum", type=float, default=0.5, help="of SGD (default: %(default)s)")
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients and factors in half precision")
parser.add_argument(
    "--gradient-predivide-factor",
    type=float,
    default=1.0,
    help="part of the division by the number of ranks that comes before their sum (default: %(default)s)",
)
parser.add_argument("--save", metavar="FILE", help="where rank 0 writes the trained parameters")
parser.add_argument(
    "--seed", type=int, default=42, help="of split, weights, dropout and order of images (default: %(default)s)"
)
args = parser.parse_args()

if args.horovod:
    import horovod.torch as hvd
else:
    import poseidon_hvd as hvd  # the one line that changes


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, padding=2)
        self.conv2 = nn.Conv2d(16, 32, 5, padding=2)
        self.drop = nn.Dropout(0.25)
        self.fc1 = nn.Linear(32 * 7 * 7, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(self.drop(x.flatten(1))))
        return F.log_softmax(self.fc2(self.drop(x)), dim=1)


def load_data():
    """Training and test images, the same split on every rank."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 8 - 1
    images = F.interpolate(images, size=28, mode="bilinear")
    dataset = TensorDataset(images, torch.from_numpy(labels))
    return random_split(dataset, [1440, len(dataset) - 1440], torch.Generator().manual_seed(args.seed))


def loader_of(dataset, shuffle):
    """Batches of this rank's share, and what shares the images out."""
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=shuffle, seed=args.seed)
    return DataLoader(dataset, batch_size=args.batch_size, sampler=sampler), sampler


def mean(value, name):
    """Over ranks; the name tells Horovod which numbers belong together."""
    return hvd.allreduce(torch.tensor(value), name=name).item()


def train(model, loader, optimizer):
    """One epoch. Returns the mean loss over ranks."""
    model.train()
    total = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return mean(total / len(loader), "loss")


def test(model, loader):
    """Loss and share of right answers on the test images, means over ranks."""
    model.eval()
    loss, right, images_seen = 0.0, 0, 0
    with torch.no_grad():
        for images, labels in loader:
            output = model(images)
            loss += F.nll_loss(output, labels, reduction="sum").item()
            right += (output.argmax(1) == labels).sum().item()
            images_seen += len(labels)
    return mean(loss / images_seen, "test_loss"), mean(right / images_seen, "test_accuracy")


def main():
    hvd.init()
    torch.manual_seed(
        args.seed + hvd.rank()
    )  # dropout differs between ranks; so do weights, until rank 0's are broadcast
    torch.set_num_threads(1)  # the ranks of a host share its cores, and layers of this size gain nothing from more

    train_set, test_set = load_data()
    train_loader, train_sampler = loader_of(train_set, shuffle=True)
    test_loader, _ = loader_of(test_set, shuffle=False)

    model = Net()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum
    )  # as many times the batch
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    for epoch in range(1, args.epochs + 1):
        train_sampler.set_epoch(epoch)
        loss = train(model, train_loader, optimizer)
        test_loss, accuracy = test(model, test_loader)
        if hvd.rank() == 0:
            print(
                f"epoch {epoch}: loss {loss:.6f}, test loss {test_loss:.6f}, test accuracy {accuracy:.2%}", flush=True
            )

    if hvd.rank() == 0:
        if args.save:
            torch.save(model.state_dict(), args.save)
        if not args.horovod:
            print(optimizer.scheme_report())


if __name__ == "__main__":
    main()
