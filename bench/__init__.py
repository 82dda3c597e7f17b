"""Measuring instruments of poseidon_hvd. Not part of the installed package."""
