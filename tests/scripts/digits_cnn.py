"""A script as written for plain Horovod, MNIST-style, on scikit-learn's digits. test_drop_in.py changes its import
line and nothing else.
"""

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

STEPS = 20

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = torch.nn.Conv2d(8, 16, 3, padding=1)
        self.fc1 = torch.nn.Linear(16 * 4 * 4, 128)
        self.fc2 = torch.nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)), inplace=True)
        return F.log_softmax(self.fc2(x), dim=1)


data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)
images = (images - images.mean()) / images.std()
dataset = TensorDataset(images, torch.tensor(data.target))
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(dataset, batch_size=16, sampler=sampler)

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.15 * hvd.size(), momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Average)

sampler.set_epoch(0)
for step, (x, y) in zip(range(STEPS), loader):
    optimizer.zero_grad()
    loss = F.nll_loss(model(x), y)
    loss.backward()
    optimizer.step()
    mean = hvd.allreduce(loss.detach().double(), name="loss")
    if hvd.rank() == 0:
        print(f"loss {step} {mean.item()!r}", flush=True)
