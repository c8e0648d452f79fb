"""Text -> token shards -> samples -> batches. The position in the data is a single number."""
