"""Confidences that mean what they say: a bias, temperature scaling, reliability metrics, online correction."""
