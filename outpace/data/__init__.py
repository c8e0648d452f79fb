"""The pipeline from text to token shards, samples and batches; its position is a single number."""
