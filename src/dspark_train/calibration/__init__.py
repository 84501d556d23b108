"""Confidences that mean what they say: temperature scaling, reliability metrics, online correction."""
