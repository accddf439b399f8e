"""Pipeline parallelism: divides the layers of a model over stages, through which micro-batches pass."""
