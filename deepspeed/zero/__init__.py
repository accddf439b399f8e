"""ZeRO: model states placed over the data-parallel ranks."""
