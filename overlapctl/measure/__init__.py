"""Measuring: trials on a device (GPU or simulated), the metrics and their statistics.

``trial`` states what a runner does, ``gpu`` runs trials on GPUs, ``simulated`` on the simulated
device; ``metrics`` and ``stats`` are pure functions of the trials they return.
"""
