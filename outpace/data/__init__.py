"""Text -> token shards -> samples -> batches; the position in the data is a number."""
