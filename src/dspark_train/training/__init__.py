"""Objective, LightningModule, ZeRO, checkpoints, feature cache and plan."""
