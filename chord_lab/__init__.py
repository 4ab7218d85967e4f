"""Chord Lab: which schedule wins at these shapes, this routing and this GPU, and why?"""

__version__ = "0.1.0"
