"""Conversations to token ids and exact loss masks, to length-grouped batches of draft blocks."""
