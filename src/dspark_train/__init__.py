"""dspark-train: train DSpark drafts for lossless speculative decoding."""

__version__ = "0.1.0"
