"""A program that runs a function of its own on several ranks, as in a notebook; prints what the function returned on
each, as JSON.
"""

import json
import os
import sys

from harness.launched import report

import poseidon_hvd as hvd


def train(steps, *, fail=False):
    if fail and int(os.environ["HOROVOD_RANK"]) == 1:
        raise ArithmeticError("the function failed")
    return report(steps)


if __name__ == "__main__":
    results = hvd.run(train, args=(3,), kwargs={"fail": "fail" in sys.argv}, num_proc=2)
    print("results " + json.dumps(results), flush=True)
