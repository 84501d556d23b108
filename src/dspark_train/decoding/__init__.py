"""Lossless speculative decoding: sampling rules, caches, the decoder, verification policies and their costs."""
