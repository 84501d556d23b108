"""The frozen target: any Hugging Face causal language model."""
