"""Text -> token shards -> samples -> batches; a position is a number."""
