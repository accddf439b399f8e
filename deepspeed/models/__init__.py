"""How models of the Transformers library are built: the only package that imports it or knows its private names."""
