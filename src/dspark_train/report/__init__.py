"""What a run shows: figures, tables, the HTML page and the model card."""
