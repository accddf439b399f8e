"""Structure of Transformers models: the only package that imports that library or uses its private names."""
