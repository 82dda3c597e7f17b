"""The published experiments as scale models on the virtual cluster. See docs/replay.md.

Run it as::

    python -m bench.replay --network vgg19-22k --hosts 16 --rate 10gbit-equivalent
"""
