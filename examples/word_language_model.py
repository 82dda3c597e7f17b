"""A word-level language model: embedding, LSTM, and gradients clipped after they have been reduced.

    horovodrun -np 2 python examples/word_language_model.py
    horovodrun -np 2 python examples/word_language_model.py --tied       # one matrix as embedding and as output layer

It learns Python's reference manual, which comes with every Python as pydoc_data. The output layer sees every word of a
batch as a row, far more than its break-even, so by bytes it is allreduced: an example of where sufficient factors do
not help.
"""

import argparse
import collections
import math
import re
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--horovod", action="store_true", help="use horovod.torch instead of poseidon_hvd")
parser.add_argument("--words", type=int, default=0, help="of the text to use; 0: all (default: %(default)s)")
parser.add_argument(
    "--vocabulary", type=int, default=4000, help="most frequent words, others count as one (default: %(default)s)"
)
parser.add_argument("--width", type=int, default=128, help="of embedding and LSTM (default: %(default)s)")
parser.add_argument("--layers", type=int, default=2, help="of the LSTM (default: %(default)s)")
parser.add_argument("--dropout", type=float, default=0.2, help="before and behind every layer (default: %(default)s)")
parser.add_argument("--tied", action="store_true", help="the output layer's weight is the embedding")
parser.add_argument("--epochs", type=int, default=10, help="passes over the text (default: %(default)s)")
parser.add_argument(
    "--batch-size",
    type=int,
    default=10,
    help="pieces of text per rank that are read side by side (default: %(default)s)",
)
parser.add_argument("--bptt", type=int, default=35, help="words per step and piece (default: %(default)s)")
parser.add_argument("--lr", type=float, default=10.0, help="initial learning rate (default: %(default)s)")
parser.add_argument("--clip", type=float, default=0.25, help="largest norm of the gradient (default: %(default)s)")
parser.add_argument("--seed", type=int, default=42, help="of weights and dropout (default: %(default)s)")
args = parser.parse_args()

if args.horovod:
    import horovod.torch as hvd
else:
    import poseidon_hvd as hvd  # the one line that changes


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(args.vocabulary, args.width)
        self.drop = nn.Dropout(args.dropout)
        self.lstm = nn.LSTM(args.width, args.width, args.layers, dropout=args.dropout if args.layers > 1 else 0.0)
        self.output = nn.Linear(args.width, args.vocabulary)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.output.weight, -0.1, 0.1)
        if args.tied:
            self.output.weight = self.embedding.weight

    def forward(self, words, memory=None):
        """words: (time, piece) -> (scores of the next word, memory to go on with)."""
        hidden, memory = self.lstm(self.drop(self.embedding(words)), memory)
        return self.output(self.drop(hidden)), memory


def load_words():
    """The text as numbers, the most frequent word 1, those outside the vocabulary 0."""
    words = re.findall(r"\w+|[^\w\s]", "\n".join(topics[name] for name in sorted(topics)).lower())[: args.words or None]
    frequent = collections.Counter(words).most_common(args.vocabulary - 1)
    number = {word: i for i, (word, _) in enumerate(frequent, start=1)}
    return torch.tensor([number.get(word, 0) for word in words])


def pieces(words):
    """Cuts a text into equal pieces, one a column, and returns this rank's."""
    count = args.batch_size * hvd.size()
    columns = words[: len(words) // count * count].view(count, -1).t()
    return columns[:, hvd.rank() :: hvd.size()].contiguous()


def steps(text):
    """(words, the words that follow them), both (time, piece)."""
    for begin in range(0, len(text) - 1, args.bptt):
        end = min(begin + args.bptt, len(text) - 1)
        yield text[begin:end], text[begin + 1 : end + 1]


def run(model, text, optimizer=None):
    """One pass over the text, with an optimizer a training one. Returns the mean loss per word over ranks."""
    model.train(optimizer is not None)
    memory, total, count = None, 0.0, 0
    for words, following in steps(text):
        scores, memory = model(words, memory)
        memory = tuple(part.detach() for part in memory)  # gradients end at the step, memory goes on
        loss = F.cross_entropy(scores.flatten(0, 1), following.flatten())
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.synchronize()  # the norm to clip is that of the mean gradient, the same on all ranks
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            with optimizer.skip_synchronize():
                optimizer.step()
        total += loss.item() * following.numel()
        count += following.numel()
    return hvd.allreduce(torch.tensor(total / count), name="loss").item()


def main():
    hvd.init()
    torch.manual_seed(
        args.seed + hvd.rank()
    )  # dropout differs between ranks; so do weights, until rank 0's are broadcast
    torch.set_num_threads(max(1, torch.get_num_threads() // hvd.local_size()))  # the ranks of a host share its cores

    words = load_words()
    split = len(words) * 9 // 10
    train_text, test_text = pieces(words[:split]), pieces(words[split:])

    model = LanguageModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.25, patience=0)

    for epoch in range(1, args.epochs + 1):
        loss = run(model, train_text, optimizer)
        with torch.no_grad():
            test_loss = run(model, test_text)
        scheduler.step(test_loss)  # the same number, so the same rate, on all ranks
        if hvd.rank() == 0:
            print(
                f"epoch {epoch}: loss {loss:.6f}, test loss {test_loss:.6f}, perplexity {math.exp(test_loss):.1f}",
                flush=True,
            )

    if hvd.rank() == 0 and not args.horovod:
        print(optimizer.scheme_report())


if __name__ == "__main__":
    main()
