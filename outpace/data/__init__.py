"""Text -> token shards -> samples -> batches; the position is a number."""
