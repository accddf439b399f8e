"""Tests of the project as a whole: imports, packaging, documents, the tree."""
