"""Making a data set: sources, collection, regeneration by the target, and a look at the result."""
