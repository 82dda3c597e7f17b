"""What the ranks of a launch run: one module per topic, each run by ``test_exchange.py`` on 2 and on 4 ranks."""
