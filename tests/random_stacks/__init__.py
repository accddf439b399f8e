"""Random stacks of features, each compared with the package itself: resumed with straight, sharded with stage 0."""
