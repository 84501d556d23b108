"""Drafts in and out: the layouts of the serving engines, model cards, and a check against a running
server."""
