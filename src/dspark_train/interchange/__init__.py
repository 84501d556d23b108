"""Drafts in and out: the layouts of the serving engines, and a check against a running server."""
