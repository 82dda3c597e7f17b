"""ResNet-50 as it is trained on ImageNet with many ranks: warm-up, accumulation, checkpoints, resuming.

    horovodrun -np 4 python examples/imagenet_resnet50.py --train-dir imagenet/train --val-dir imagenet/val
    horovodrun -np 2 python examples/imagenet_resnet50.py --width 8 --image-size 32 --batch-size 4 \\
        --images 64 --epochs 3  # small

Folders hold one folder of pictures per class, and reading them takes Pillow. Without folders the pictures are random
ones that a network can tell apart. A run that finds checkpoints goes on behind the last one, whichever of the two
libraries wrote it.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from networks import resnet50
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--horovod", action="store_true", help="use horovod.torch instead of poseidon_hvd")
parser.add_argument("--train-dir", type=Path, help="folder of training pictures (default: random ones)")
parser.add_argument("--val-dir", type=Path, help="folder of validation pictures (default: random ones)")
parser.add_argument(
    "--images",
    type=int,
    default=1280,
    help="random training pictures; a quarter as many for validation (default: %(default)s)",
)
parser.add_argument("--image-size", type=int, default=224, help="side in pixels, at least 32 (default: %(default)s)")
parser.add_argument(
    "--classes", type=int, default=1000, help="of the network and of random pictures (default: %(default)s)"
)
parser.add_argument(
    "--width", type=int, default=64, help="channels of the first layer; 64 is ResNet-50 (default: %(default)s)"
)
parser.add_argument(
    "--batch-size", type=int, default=32, help="images per rank and backward pass (default: %(default)s)"
)
parser.add_argument(
    "--batches-per-allreduce", type=int, default=1, help="backward passes per step (default: %(default)s)"
)
parser.add_argument(
    "--epochs", type=int, default=90, help="to train in all, those before a checkpoint included (default: %(default)s)"
)
parser.add_argument(
    "--base-lr", type=float, default=0.0125, help="learning rate for one batch of one rank (default: %(default)s)"
)
parser.add_argument(
    "--warmup-epochs", type=float, default=5, help="until the rate has risen to its peak (default: %(default)s)"
)
parser.add_argument(
    "--milestones", type=float, nargs="*", default=[30, 60, 80], help="epochs after which the rate falls to a tenth"
)
parser.add_argument("--momentum", type=float, default=0.9, help="of SGD (default: %(default)s)")
parser.add_argument("--wd", type=float, default=5e-5, help="weight decay (default: %(default)s)")
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients and factors in half precision")
parser.add_argument(
    "--checkpoints", type=Path, metavar="FOLDER", help="where to write, and look for, epoch-N.pt (default: nowhere)"
)
parser.add_argument(
    "--workers", type=int, default=0, help="processes that read pictures, per rank (default: %(default)s)"
)
parser.add_argument("--seed", type=int, default=42, help="of pictures, weights and their order (default: %(default)s)")
args = parser.parse_args()

if args.horovod:
    import horovod.torch as hvd
else:
    import poseidon_hvd as hvd  # the one line that changes


class RandomPictures(Dataset):
    """Noise around one color per class."""

    def __init__(self, count, first):
        self.first, self.count = first, count
        self.colors = torch.randn(args.classes, 3, 1, 1, generator=torch.Generator().manual_seed(args.seed))

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        label = index % args.classes
        noise = torch.randn(
            3, args.image_size, args.image_size, generator=torch.Generator().manual_seed(self.first + index)
        )
        return self.colors[label] + noise, label


class Folder(Dataset):
    """ROOT/CLASS/PICTURE. A random square of each when training, else the middle."""

    def __init__(self, root, training):
        self.training = training
        classes = sorted(folder for folder in root.iterdir() if folder.is_dir())
        self.pictures = [
            (picture, label) for label, folder in enumerate(classes) for picture in sorted(folder.iterdir())
        ]

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        from PIL import Image

        path, label = self.pictures[index]
        with Image.open(path) as image:
            image = image.convert("RGB")
            share = 0.08 + 0.92 * torch.rand(()).item() if self.training else 0.77  # of the area of the largest square
            side = min(image.size) * share**0.5
            left, top = ((length - side) * (torch.rand(()).item() if self.training else 0.5) for length in image.size)
            image = image.resize((args.image_size, args.image_size), box=(left, top, left + side, top + side))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 128 - 1
        return pixels.flip(2) if self.training and torch.rand(()) < 0.5 else pixels, label


def loader_of(dataset, training):
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=training, seed=args.seed)
    # A step's pictures come together and are split for its backward passes.
    rows = args.batch_size * (args.batches_per_allreduce if training else 1)
    return DataLoader(dataset, batch_size=rows, sampler=sampler, num_workers=args.workers, drop_last=training), sampler


class Mean:
    """Of a number per image, over images and ranks."""

    def __init__(self, name):
        self.name, self.sum, self.count = name, 0.0, 0

    def add(self, mean, count):
        self.sum += mean * count
        self.count += count

    def value(self):
        total = hvd.allreduce(torch.tensor([self.sum, self.count], dtype=torch.float64), op=hvd.Sum, name=self.name)
        return (total[0] / total[1]).item()


def learning_rate(epoch):
    """Of a moment within an epoch: from one rank's rate up to all ranks' (Goyal et al. 2017), then down at the
    milestones.
    """
    peak = args.base_lr * args.batches_per_allreduce * hvd.size()
    if epoch < args.warmup_epochs:
        start = peak / hvd.size()
        return start + (peak - start) * epoch / args.warmup_epochs
    return peak * 0.1 ** sum(epoch >= milestone for milestone in args.milestones)


def train(epoch, model, loader, optimizer):
    """One epoch. Returns the mean loss over ranks."""
    model.train()
    mean_loss = Mean("train_loss")
    for step, (images, labels) in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(epoch + step / len(loader))
        optimizer.zero_grad()
        for part, part_labels in zip(images.split(args.batch_size), labels.split(args.batch_size)):
            loss = F.cross_entropy(model(part), part_labels)
            mean_loss.add(loss.item(), len(part))
            (loss * len(part) / len(images)).backward()  # gradients of several passes are summed
        optimizer.step()
    return mean_loss.value()


def validate(model, loader):
    """Loss and share of right answers, means over all images."""
    model.eval()
    loss, accuracy = Mean("val_loss"), Mean("val_accuracy")
    with torch.no_grad():
        for images, labels in loader:
            output = model(images)
            loss.add(F.cross_entropy(output, labels).item(), len(images))
            accuracy.add((output.argmax(1) == labels).float().mean().item(), len(images))
    return loss.value(), accuracy.value()


def resume(model, optimizer):
    """Loads the last checkpoint on rank 0 and gives all ranks its state.

    Returns the number of epochs that it has seen.
    """
    epochs = 0
    if hvd.rank() == 0 and args.checkpoints:
        epochs = max((int(path.stem.partition("-")[2]) for path in args.checkpoints.glob("epoch-*.pt")), default=0)
    epochs = hvd.broadcast_object(epochs, root_rank=0, name="epochs")
    if hvd.rank() == 0 and epochs > 0:
        checkpoint = torch.load(args.checkpoints / f"epoch-{epochs}.pt")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    # The optimizer first: where it has no state yet this takes a step without gradients, and with weight decay that
    # moves parameters.
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return epochs


def save(epochs, model, optimizer):
    """Complete or not at all, also if the job is ended in the middle."""
    path = args.checkpoints / f"epoch-{epochs}.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def main():
    hvd.init()
    torch.set_num_threads(max(1, torch.get_num_threads() // hvd.local_size()))  # the ranks of a host share its cores
    torch.manual_seed(
        args.seed + hvd.rank()
    )  # what pictures are cropped to differs between ranks; the weights are rank 0's

    train_set = Folder(args.train_dir, training=True) if args.train_dir else RandomPictures(args.images, 0)
    val_set = Folder(args.val_dir, training=False) if args.val_dir else RandomPictures(args.images // 4, args.images)
    train_loader, sampler = loader_of(train_set, training=True)
    val_loader, _ = loader_of(val_set, training=False)

    model = resnet50(args.classes, args.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate(0), momentum=args.momentum, weight_decay=args.wd)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=args.batches_per_allreduce,
    )
    first = resume(model, optimizer)

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        loss = train(epoch, model, train_loader, optimizer)
        val_loss, accuracy = validate(model, val_loader)
        if hvd.rank() == 0:
            print(
                f"epoch {epoch + 1}: loss {loss:.6f}, validation loss {val_loss:.6f}, accuracy {accuracy:.2%}, "
                f"learning rate {optimizer.param_groups[0]['lr']:.5f}",
                flush=True,
            )
            if args.checkpoints:
                save(epoch + 1, model, optimizer)

    if hvd.rank() == 0 and not args.horovod:
        print(optimizer.scheme_report().splitlines()[0])  # the others: a line per tensor


if __name__ == "__main__":
    main()
