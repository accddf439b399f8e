"""Structure of Transformers models: the only package that imports that library or knows its private names."""
