"""Building sharded models: ``zero.Init``, first values, and moving them into an engine's buckets."""
