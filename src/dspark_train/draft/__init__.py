"""The DSpark draft: one model for all targets."""
