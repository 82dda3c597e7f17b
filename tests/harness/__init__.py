"""Real processes for tests: launching them, running named cases in them, and comparing their gradients with
references.
"""
