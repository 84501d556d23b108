"""Lossless speculative decoding, verification policies, studies of load."""
