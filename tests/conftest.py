"""Tiny models shared by the tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault(
    "WANDB__SERVICE_WAIT", "300"
)  # seconds that a slow machine may take to start its writer
sys.path.insert(0, str(Path(__file__).parent))

# a slow machine fails no test: the first draw on a fresh one builds tables of Unicode for seconds
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
