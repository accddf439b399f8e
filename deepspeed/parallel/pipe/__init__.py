"""Pipeline parallelism: the layers of a model are divided over stages, micro-batches flow through them."""
